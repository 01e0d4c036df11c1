r"""One GRPO step of miles against TRL's GRPOTrainer and verl: same checkpoint, prompts, reward and machine, taking turns.

64 prompts x 8 samples, at most 16 new tokens, FP32, one optimiser step on all 512 samples, no KL term. Each side runs its
own real training loop in its own process and is held between two steps. A turn is some complete steps, the first of them not counted:
prompts, generation, reward, loss, backward, optimiser, and (miles, verl) weight sync and metrics. The last line is one JSON object.

TRL is given its fastest settings here: FP32 without autocast, one micro-batch of 512, no gradient checkpointing, no
load-balancing loss (miles has none on either), the grouped expert kernel, no logging, no saving, data loading in process.

``--model DIR`` takes a real checkpoint instead of the random one: a chat model, asked for sums of two numbers through its own chat
template, ``--prompts-a-step 16`` of them on a small machine.

``--gpu dense`` (or ``moe``, ``qwen3-4b``) is the same comparison on a GPU in BF16: a random model of ``checkpoints.py``, 32 prompts of 64 tokens x 8
samples of 256 tokens. While one side works, the others stay on the GPU, without memory that they only cache. TRL generates with Transformers.
``--verl`` adds verl with SGLang (``verl_step.py``), ``--sglang`` miles with SGLang. Where they do not fit together, with ``--apart`` each side makes
its turns alone, and every step counts. A side that does not start is named in ``failed``, and the others go on; the exit status is then 1.

    python benchmarks/training/grpo_step.py --gpu dense --trl-batch 64 --plugins --flags "--plugins tis" --sglang SGLANG --verl \
        --verl-path VERL:SGLANG:RAY --trl-path TRL --turns 5 --warm-up 1 --steps-a-turn 1 --threads 4 --out turns.json --logs logs --save
    python benchmarks/training/grpo_step.py --gpu qwen3-4b --no-trl --apart --micro-batch 8192 ...

``--plugins`` and ``--also`` are further sides of miles, ``--flags`` go to all of them, and ``--no-trl`` leaves TRL out. ``times_bare`` is the median
over the turns of a side's seconds relative to those of miles without plugins, with its 95 % interval (order statistics; no distribution is
assumed). What routing replay costs, on a CPU, and with SGLang next to the embedded trainer:

    python benchmarks/training/grpo_step.py --no-trl --plugins r3 --turns 60 --steps-a-turn 1 --variant r3 --save
    python benchmarks/training/grpo_step.py --no-trl --gpu moe --plugins tis,r3 --turns 40 --steps-a-turn 1 --micro-batch 16384 --variant r3 --save \
        --flags "--plugins tis --engine sglang --rollout-max-context-len 328 --sglang-attention-backend triton --sglang-sampling-backend pytorch
            --sglang-moe-runner-backend triton --sglang-cuda-graph-bs-decode 64,256 --sglang-mem-fraction-static 0.2
            --sglang-max-total-tokens 100000 --sglang-sleep-on-idle"

and what emulated number formats cost:

    python benchmarks/training/grpo_step.py --no-trl --plugins --steps-a-turn 1 --variant formats --save \
        --also "--rollout-fp8 --emulate-precision" "--rollout-fp8 --train-fp8 --emulate-precision"
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    Reporter,
    Steps,
    Worker,
    alternate,
    finish,
    installed,
    median_interval,
    medians,
    options,
    spread,
)
from benchmarks.training.trl_step import work_with_trl
from benchmarks.training.verl_step import work_with_verl
from benchmarks.training.workload import (
    GPU_TOKENS,
    LR,
    RESPONSE_TOKENS,
    SAMPLES,
    device_of,
    make_workload,
    questions_for,
    random_words,
    release_memory,
    train_in_turns,
    wait_for_device,
)

#: Prompts of a step, on a CPU and on a GPU.
PROMPTS, GPU_PROMPTS = 64, 32
#: Tokens in a micro-batch of miles, on a CPU and on a GPU, and of verl, which keeps more activations.
MICRO_BATCH, GPU_MICRO_BATCH, VERL_MICRO_BATCH = 65536, 36000, 16384


def work_with_miles(given: argparse.Namespace, reporter: Reporter) -> None:
    """Run ``miles train``, with the worker's flags, held before each step. The device's queue is empty when a step's time is taken."""
    turn, count = Steps(reporter, given.steps_a_turn, given.uncounted), given.prompts_a_step
    started: list[bool] = []

    def wait() -> None:
        if not started:
            reporter.send(versions=installed("miles-core", "torch", "transformers"))
            started.append(True)
        release_memory(given, turn)
        turn.wait()

    def report(record: dict[str, Any], seconds: float, _: float) -> None:
        phases = {k.removeprefix("time/"): v for k, v in record.items() if k.startswith("time/") and k != "time/step"}
        gap = record["mismatch/abs_log_prob"]
        turn.report(seconds=seconds, length=record["rollout/length_mean"], gap=gap, **phases)

    flags = f"""--hf-checkpoint {given.checkpoint} --prompt-data {given.prompts} --input-key prompt --label-key label
        --custom-rm-path {Path(__file__).with_name("workload.py")}:{"rm_odd" if given.gpu else "rm"}
        --device {device_of(given)} --dtype {"bfloat16" if given.gpu else "float32"}
        --rollout-batch-size {count} --n-samples-per-prompt {SAMPLES} --num-rollout {given.steps}
        --rollout-max-response-len {given.tokens} --max-running-requests {count * SAMPLES} --lr {LR}
        --weight-decay 0 --adam-beta2 0.999 --clip-grad 1.0 --eps-clip 0.2 --loss-aggregation token_mean
        --use-dynamic-batch-size --max-tokens-per-gpu {given.micro_batch} --seed 0
        --log-level warning"""
    if given.gpu:
        flags += f" --rollout-max-context-len {longest_sample(given)}"
    train_in_turns([*flags.split(), *given.worker_flags.split()], wait, report, lambda: wait_for_device(given))


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Take turns between TRL, verl and miles, bare and with each set of plugins."""
    with tempfile.TemporaryDirectory() as directory:
        if given.gpu:
            work = random_words(Path(directory), given.gpu)
            empty_cache()
        elif given.model:
            work = questions_for(Path(directory), Path(given.model))
        else:
            work = make_workload(Path(directory), given.shots)
        workload = {
            "prompts": given.prompts_a_step,
            "model": Path(given.model).name if given.model else given.gpu or "random Qwen3-MoE",
            "samples": SAMPLES,
            "max_new_tokens": given.tokens,
            "prompt_tokens": 64 if given.gpu else round(statistics.fmean(len(p.encode()) for p in work.prompts), 1),
            "threads": given.threads,
            "turns": given.turns,
            "steps_a_turn": given.steps_a_turn,
            "apart": given.apart,
            "flags": given.flags,
        }
        return take_turns(given, commands_of(given, work.checkpoint, work.prompt_file), {"workload": workload})


def commands_of(given: argparse.Namespace, checkpoint: Path, prompts: Path) -> dict[str, list[str]]:
    """Return the command of each side's process."""
    steps = (given.warm_up + given.turns) * (given.steps_a_turn + given.uncounted) + 1
    common = [str(Path(__file__).resolve()), f"--checkpoint={checkpoint}", f"--prompts={prompts}", f"--steps={steps}"]
    for name in ("steps_a_turn", "uncounted", "prompts_a_step", "tokens", "micro_batch"):
        common.append(f"--{name.replace('_', '-')}={getattr(given, name)}")
    common += ["--model", given.model] if given.model else []
    common += ["--gpu", given.gpu] if given.gpu else []
    flags = {"miles": "", **{f"miles {p}": f"--plugins {p}" for p in given.plugins}}
    flags |= {f"miles {more}": more for more in given.also}
    if given.sglang is not None:
        flags["miles sglang"] = sglang_flags(given)
    commands = {
        name: [sys.executable, *common, "--worker", "miles", f"--worker-flags={given.flags} {more}"]
        for name, more in flags.items()
    }
    if not given.no_trl:
        extra = ["--trl-experts", given.trl_experts, "--trl-batch", str(given.trl_batch)]
        commands["trl"] = [given.trl_python, *common, "--worker", "trl", *extra]
    if given.verl:
        extra = ["--verl-batch", str(given.verl_batch), "--verl-settings", *given.verl_settings]
        commands["verl"] = [sys.executable, *common, "--worker", "verl", *extra]
    return commands


def longest_sample(given: argparse.Namespace) -> int:
    """Return the most tokens of a prompt and its response on a GPU, and some space."""
    return 64 + int(given.tokens) + 8


def sglang_flags(given: argparse.Namespace) -> str:
    """Return the flags of miles with SGLang."""
    rows = given.prompts_a_step * SAMPLES
    flags = f"--engine sglang --sglang-sleep-on-idle --sglang-max-total-tokens {rows * longest_sample(given)}"
    if device_of(given) == "cuda":
        flags += f""" --sglang-attention-backend triton --sglang-sampling-backend pytorch --sglang-moe-runner-backend triton
            --sglang-mem-fraction-static 0.3 --sglang-cuda-graph-bs-decode {rows // 4},{rows}"""
    return flags + (f" --sglang-python-path {given.sglang}" if given.sglang else "")


def take_turns(given: argparse.Namespace, commands: dict[str, list[str]], result: dict[str, Any]) -> dict[str, Any]:
    """Alternate between the sides, or with ``--apart`` run one after the other. After each turn, write the results so far to ``--out``."""
    reports: dict[str, list[dict[str, Any]]] = {}
    result |= {"worker_versions": {}, "failed": {}}

    def note(found: dict[str, list[dict[str, Any]]]) -> None:
        reports.update(found)
        result.update(summarize(reports), gpu_memory_gb=used_memory(given))
        if given.out is not None:
            given.out.write_text(json.dumps(result, indent=1))

    for group in [[name] for name in commands] if given.apart else [list(commands)]:
        with ExitStack() as stack:
            workers = []
            for name in group:
                workers.append(start(given, name, commands[name]))
                stack.callback(workers[-1].close, patience=30 if name == "verl" else 0)
            alternate([worker for worker in workers if is_ready(worker, result)], given.turns, given.warm_up, note)
    return result


def start(given: argparse.Namespace, name: str, command: list[str]) -> Worker:
    """Start a side in the background."""
    log = given.logs / f"{name.replace(' ', '-')[:40]}.log" if given.logs else None
    path = {"trl": given.trl_path, "verl": given.verl_path}.get(name)
    return Worker(name, command, given.threads, wait=False, path=path, log=log)


def is_ready(worker: Worker, result: dict[str, Any]) -> bool:
    """Wait until a side can make its first step, and note its versions, or that it ended."""
    try:
        result["worker_versions"][worker.name] = worker.hello["versions"]
    except SystemExit as error:
        result["failed"][worker.name] = str(error)
        print(error, file=sys.stderr, flush=True)
    return worker.name not in result["failed"]


def summarize(reports: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians of each side, and how they compare."""
    sides: dict[str, dict[str, Any]] = {n: medians(r) | {"range": spread(r)} for n, r in reports.items() if r}
    found: dict[str, Any] = {"sides": sides}
    if "miles" in sides:
        bare = reports["miles"]
        found["times_bare"] = {n: times(r, bare) for n, r in reports.items() if n != "miles" and len(r) == len(bare)}
    for peer in ("trl", "verl"):
        if peer in sides:
            theirs = sides[peer]["seconds"]
            found[f"times_faster_than_{peer}"] = {
                n: round(theirs / side["seconds"], 2) for n, side in sides.items() if n.startswith("miles")
            }
    return found


def used_memory(given: argparse.Namespace) -> float | None:
    """Memory in use on the GPU by all sides between two turns."""
    if device_of(given) == "cpu":
        return None
    import torch

    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 1e9, 1)


def empty_cache() -> None:
    """Give the memory in which the model was made back to the GPU."""
    import torch

    torch.cuda.empty_cache()


def times(reports: Sequence[dict[str, float]], bare: Sequence[dict[str, float]]) -> list[float]:
    """Median of the ratios turn by turn, and its 95 % interval."""
    ratios = [own["seconds"] / other["seconds"] for own, other in zip(reports, bare, strict=True)]
    return [round(value, 4) for value in (statistics.median(ratios), *median_interval(ratios))]


def main() -> None:
    given = parse()
    if given.worker == "verl":
        work_with_verl(given, Reporter(), SAMPLES)
    elif given.worker == "trl":
        work_with_trl(given, Reporter())
    elif given.worker == "miles":
        work_with_miles(given, Reporter())
    else:
        result = compare(given)
        variant = "-".join(part for part in (given.variant, given.gpu) if part)
        finish("grpo_step", result, given.save, lambda: installed("miles-core"), variant)
        raise SystemExit(bool(result["failed"]))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = options(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--turns", type=int, default=15, help="measured turns of each side")
    parser.add_argument("--warm-up", type=int, default=2, help="unmeasured turns of each side")
    parser.add_argument("--steps-a-turn", type=int, default=2, help="counted steps of a turn, after one that is not")
    plugins = ["r3,tis", "cpu_kernels", "cpu_kernels,r3,tis"]
    parser.add_argument("--plugins", nargs="*", default=plugins, help="plugin sets to measure beside the bare loop")
    parser.add_argument("--also", nargs="*", default=[], help="sets of further flags of miles train to measure")
    parser.add_argument("--flags", default="", help="flags of every side of miles")
    parser.add_argument("--sglang", nargs="?", const="", metavar="PATH", help="also miles with SGLang, installed there")
    parser.add_argument("--apart", action="store_true", help="one side after the other; every step counts")
    parser.add_argument("--out", type=Path, help="write results here after every turn")
    parser.add_argument("--logs", type=Path, help="an existing folder for what the sides print")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--shots", type=int, default=0, help="worked examples before each prompt (about 9 tokens each)")
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has trl installed")
    parser.add_argument("--trl-path", help="import path of TRL's process, instead of this one's PYTHONPATH")
    parser.add_argument("--trl-experts", default="grouped_mm", help="Transformers' experts implementation for TRL")
    parser.add_argument("--trl-batch", type=int, default=0, help="TRL's micro-batch (default: all samples of a step)")
    parser.add_argument("--verl", action="store_true", help="also verl with SGLang, on the random models of --gpu")
    parser.add_argument("--verl-path", help="import path of verl's processes, instead of this one's PYTHONPATH")
    parser.add_argument("--verl-batch", type=int, default=VERL_MICRO_BATCH, help="tokens in a micro-batch of verl")
    parser.add_argument("--verl-settings", nargs="*", default=[], help="further settings of verl, as NAME=VALUE")
    parser.add_argument("--model", default="", help="a chat model's checkpoint instead of the random one")
    sizes = ("dense", "moe", "qwen3-4b", "tiny", "tiny_dense")
    parser.add_argument("--gpu", choices=sizes, default="", help="a random BF16 model on a GPU")
    parser.add_argument("--prompts-a-step", type=int, default=0, help="prompts of a step (default: 64; on a GPU 32)")
    parser.add_argument("--tokens", type=int, default=0, help="of a response at most (default: 16; on a GPU 256)")
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="tokens in a micro-batch of miles (default: 65536; on a GPU 36000)"
    )
    for name in ("--worker", "--checkpoint", "--prompts", "--worker-flags"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--uncounted", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.verl and not given.gpu:
        parser.error("--verl takes its workload from --gpu")
    given.uncounted = 0 if given.apart else given.uncounted
    given.prompts_a_step = given.prompts_a_step or (GPU_PROMPTS if given.gpu else PROMPTS)
    given.tokens = given.tokens or (GPU_TOKENS if given.gpu else RESPONSE_TOKENS)
    given.micro_batch = given.micro_batch or (GPU_MICRO_BATCH if given.gpu else MICRO_BATCH)
    given.trl_batch = given.trl_batch or given.prompts_a_step * SAMPLES
    return given


if __name__ == "__main__":
    main()
