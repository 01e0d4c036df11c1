"""A pretrained model learns two-digit additions: held-out accuracy, seconds a step by phase, and the gap between engine and trainer.

The same task (chat additions answered with the number only), rates and seed by different engines, trainers, schedules and plugins
(``--variants``); ``sglang_moe_r3`` trains a mixture of experts made out of the model. Every variant is one ``miles train``.
``--metrics NAME=FILE`` reports on the metrics.jsonl of a run that was made elsewhere, with the flags that ``--machine``
tells. The last line is one JSON object.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import finish, options

_SGLANG = "--engine sglang --sglang-attention-backend triton --sglang-sampling-backend pytorch"
_RAY = "--runtime ray --actor-num-gpus-per-node 1 --rollout-num-gpus 1"
_FP8 = "--rollout-fp8 --extra-high-precision-layers-hf q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj"  # 576 is not a multiple of 128
VARIANTS = {
    "embedded": "--plugins tis",
    "sglang": f"{_SGLANG} --plugins tis",
    "sglang_fp8": f"{_SGLANG} --plugins tis,fp8 {_FP8}",
    "sglang_moe_r3": f"{_SGLANG} --plugins r3,tis --verify-logprobs",
    "megatron": f"{_SGLANG} --sglang-disable-cuda-graph --sglang-mem-fraction-static 0.4 --trainer megatron --plugins tis",
    "ray_sync": f"{_RAY} --plugins tis",
    "ray_async": f"{_RAY} --plugins tis --schedule async",
    "ray_megatron": f"{_SGLANG} --sglang-disable-cuda-graph {_RAY} --trainer megatron --plugins tis",
    "ray_megatron_moe_fp8": f"{_SGLANG} --sglang-disable-cuda-graph {_RAY} --trainer megatron --plugins r3,tis,fp8 --fp8-recipe blockwise",
    "ray_buckets": f"{_SGLANG} --sglang-disable-cuda-graph {_RAY} --plugins tis --use-zero-copy-sync",
}
REWARD = '''import re

def reward(args, sample):
    """1 for the right number as the last one of the answer, .1 for any number."""
    found = re.findall(r"-?\\d+", sample.response.replace(",", ""))
    return {"score": 1.0 if found and found[-1] == sample.label else 0.1 if found else 0.0}
'''
COMMON = (
    "--input-key prompt --label-key label --apply-chat-template --reward-key score --lr 1e-5 --rollout-batch-size 64 "
    "--n-samples-per-prompt 8 --rollout-max-response-len 16 --max-running-requests 512 --use-dynamic-batch-size "
    "--max-tokens-per-gpu 32768 --seed 0"
)
PHASES = ("step", "rollout", "prepare", "train", "sync", "other")


def write_task(directory: Path) -> None:
    """Prompts to train on, others to evaluate on, and the reward."""
    generator = random.Random(0)

    def row() -> str:
        a, b = generator.randint(10, 99), generator.randint(10, 99)
        question = f"What is {a} + {b}? Answer with the number only."
        return json.dumps({"prompt": [{"role": "user", "content": question}], "label": str(a + b)}) + "\n"

    (directory / "train.jsonl").write_text("".join(row() for _ in range(4096)))
    (directory / "eval.jsonl").write_text("".join(row() for _ in range(64)))
    (directory / "reward.py").write_text(REWARD)


def trained(variant: str, model: Path, steps: int, every: int, directory: Path) -> Path:
    """The metrics of a run of one variant."""
    if "moe" in variant:
        from benchmarks.learning.upcycled import upcycle

        model = upcycle(model, directory / "moe")
    files = f"--prompt-data {directory}/train.jsonl --eval-prompt-data {directory}/eval.jsonl --custom-rm-path {directory}/reward.py:reward"
    run = directory / variant
    asked = f"--hf-checkpoint {model} {files} {COMMON} --save {run} --num-rollout {steps} --eval-interval {every} {VARIANTS[variant]}"
    subprocess.run([sys.executable, "-m", "miles_core", "train", *asked.split()], check=True, stdout=sys.stderr)
    return run / "metrics.jsonl"


def summary(metrics: Path) -> dict[str, Any]:
    """What a run's metrics say; seconds are medians without the first two steps, which compile."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "time/step" in row]
    late = steps[2:] or steps

    def middle(name: str, digits: int) -> float | None:
        found = [row[name] for row in late if name in row]
        return round(median(found), digits) if found else None

    return {
        "steps": len(steps),
        "accuracy": {row["step"]: round(row["eval/accuracy"], 4) for row in rows if "eval/accuracy" in row},
        "reward_last_5": round(sum(row["reward/mean"] for row in steps[-5:]) / len(steps[-5:]), 4),
        "seconds_in_all": round(sum(row["time/step"] for row in steps), 1),
        "seconds": {phase: middle(f"time/{phase}", 3) for phase in PHASES},
        "sync_gb_per_second": middle("sync/gb_per_second", 3),
        "abs_log_prob_gap": [round(row["mismatch/abs_log_prob"], 5) for row in (steps[0], steps[-1])],
        "staleness": middle("rollout/staleness_mean", 3),
        "routers_differing": middle("r3/routers_differing", 4),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["embedded"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--eval-interval", type=int, default=15)
    parser.add_argument("--metrics", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--machine", default="", help="what the runs of --metrics were made on")
    given = parser.parse_args()
    if given.metrics:
        files = {name: Path(file) for name, file in (pair.split("=", 1) for pair in given.metrics)}
        found = {name: summary(file) for name, file in files.items()}
    elif given.model is None:
        parser.error("give --model, the directory of SmolLM2-135M-Instruct, or --metrics")
    else:
        with tempfile.TemporaryDirectory() as name:
            write_task(Path(name))
            asked = (given.model.resolve(), given.steps, given.eval_interval, Path(name))
            found = {v: {"options": VARIANTS[v], **summary(trained(v, *asked))} for v in given.variants}
    finish("learning", {"machine": given.machine, "common": COMMON, "variants": found}, given.save, dict, "gpu")


if __name__ == "__main__":
    main()
