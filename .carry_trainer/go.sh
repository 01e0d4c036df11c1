mkdir -p /tmp/s && tar xzf .carry_trainer/src.tgz -C /tmp/s && cp .carry_trainer/*.py /tmp/s/ && cd /tmp/s
export PYTHONPATH=/tmp/s PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
lscpu | grep "Model name"; python3 -c "import torch,transformers;print(torch.__version__,transformers.__version__)"
python3 -m pytest -q tests/embedded/test_trainer.py tests/embedded/test_experts.py tests/embedded/test_attention.py -k "gpu or equal or qwen3 or Qwen3" 2>&1 | tail -25
python3 long.py 2>&1 | grep -v Warn | tail -20
for i in 1 2; do
for th in 1 2; do export OMP_NUM_THREADS=$th; echo threads $th; taskset -c 0-$((th-1)) python3 plain.py 2>&1 | grep ^plain; for mt in 1200 2300 4400 9000; do taskset -c 0-$((th-1)) python3 ut.py mt=$mt 2>&1 | grep "^mt\|Err"; done;  taskset -c 0-$((th-1)) python3 ut.py mt=2300 norm rot 2>&1 | grep "^mt\|Err";  taskset -c 0-$((th-1)) python3 ut.py mt=2300 var 2>&1 | grep "^mt\|Err"; done; done
OMP_NUM_THREADS=1 taskset -c 0 python3 bench.py mt=2300 prof 2>&1 | grep -A36 "^params" | cut -c1-110
