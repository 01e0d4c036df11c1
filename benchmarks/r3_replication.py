"""A toy replication of rollout routing replay (arXiv 2510.11370): FP8 rollout, BF16 training, several optimiser steps a rollout.

The demo's mixture of experts learns two-digit addition after one supervised warm start that all runs share. FP8 is emulated
(block-wise E4M3 codes, weights and activations), so its numerics run on any machine. Each arm trains with the same seeds, and so on
the same prompts. ``bf16`` quantises nothing and ``fp8-both`` quantises both sides alike. Reported per arm, over all steps
and seeds, as mean and 95 % t-interval over seeds: KL(rollout || train) by k3, before the first update of each rollout;
the share of routers at which the trainer would have chosen other experts (only r3 records the engine's, so its arms); reward of
the last steps, and its paired difference from ``plain``. What r3 costs a step is measured by ``r3_overhead.py``. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import finish, installed, options

DRIFT = ["--rollout-precision", "fp8"]
ARMS = {
    "bf16": [],
    "plain": DRIFT,
    "r3": [*DRIFT, "--use-r3"],
    "tis": [*DRIFT, "--use-tis"],
    "r3+tis": [*DRIFT, "--use-r3", "--use-tis"],
    "fp8-both": [*DRIFT, "--train-precision", "fp8"],
}
#: Two-sided 95 % quantile of Student's t, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
LAST = 3


def arguments(place: Path, model: Path, run: Path, given: argparse.Namespace, steps: int) -> list[str]:
    """Flags that all arms share."""
    return f"""--hf-checkpoint {model} --prompt-data {place}/data/train.jsonl --input-key prompt --label-key label
        --rollout-shuffle --rm-type exact --rollout-batch-size {given.prompts} --n-samples-per-prompt 8
        --rollout-max-response-len 4 --num-rollout {steps} --num-steps-per-rollout {given.mini_steps} --lr {given.lr}
        --weight-decay 0 --adam-beta2 0.99 --eps-clip-high 0.28 --use-dynamic-batch-size --max-tokens-per-gpu 16384
        --device cpu --dtype {given.dtype} --emulate-precision --log-level error --save {run}""".split()


def train(words: list[str]) -> list[dict[str, Any]]:
    """One run in this process; its metrics, a record a step."""
    from rich.console import Console

    from miles_core.config.load import load
    from miles_core.launch import launch
    from miles_core.observe.metrics import read
    from miles_core.run.prepare import apply_plan, prepare

    config = load(words)
    plan, catalogue = prepare(config)
    run = launch(apply_plan(config, plan), plan, catalogue, Console(file=io.StringIO()))
    return read(run.directory / "metrics.jsonl")


def warm_start(place: Path, given: argparse.Namespace) -> Path:
    """The model all arms start from."""
    from miles_tools.demo.model import make_checkpoint
    from miles_tools.demo.task import write_task

    make_checkpoint(place / "model")
    write_task(place / "data")
    words = arguments(place, place / "model", place / "warm", given, 0)
    sft = (
        f"--sft-data {place}/data/demonstrations.jsonl --sft-steps {given.sft_steps} --sft-batch-size 128 --sft-lr 3e-3"
    )
    train([*words, *sft.split(), "--export-hf", str(place / "warmed"), "--seed", "0"])
    return place / "warmed"


def interval(values: list[float], digits: int = 5) -> list[float | None]:
    """[mean, half width of its 95 % t-interval over seeds]; None for one seed."""
    if len(values) < 2:
        return [round(statistics.fmean(values), digits), None]
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return [round(statistics.fmean(values), digits), round(half, digits)]


def summary(runs: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Mismatch, routers and reward of each arm: means over runs with the half-widths of their intervals."""

    def over(arm: str, name: str, last: int = 0) -> list[float]:
        return [statistics.fmean(r[name] for r in run[-last:]) for run in runs[arm] if name in run[0]]

    base = over("plain", "reward/mean", LAST)
    table: dict[str, Any] = {}
    for arm, found in runs.items():
        reward = over(arm, "reward/mean", LAST)
        row: dict[str, Any] = {
            "mismatch_kl_k3": interval(over(arm, "mismatch/kl_k3"), 7),
            "mismatch_abs_log_prob": interval(over(arm, "mismatch/abs_log_prob"), 6),
            "reward_last": interval(reward),
            "reward_minus_plain": interval([a - b for a, b in zip(reward, base, strict=True)]),
            "reward_curve": [
                round(statistics.fmean(step), 4)
                for step in zip(*([r["reward/mean"] for r in run] for run in found), strict=True)
            ],
        }
        for name in ("r3/routers_differing", "r3/tokens_differing", "tis/ess"):
            if values := over(arm, name):
                row[name] = interval(values)
        table[arm] = row
    return table


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="rollouts of a run")
    parser.add_argument("--prompts", type=int, default=32, help="prompts a rollout, 8 samples each")
    parser.add_argument("--mini-steps", type=int, default=4, help="optimiser steps a rollout")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the model's copy")
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.set_defaults(threads=1)
    given = parser.parse_args()
    import torch

    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        model = warm_start(place, given)
        runs: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in dict.fromkeys(["plain", *given.arms])}
        for seed in range(given.seeds):
            for arm, found in runs.items():
                started = time.perf_counter()
                words = arguments(place, model, place / f"{arm}-{seed}", given, given.steps)
                found.append(train([*words, *ARMS[arm], "--seed", str(seed)]))
                kl = statistics.fmean(r["mismatch/kl_k3"] for r in found[-1])
                shown = f"KL {kl:.2e}  reward {found[-1][-1]['reward/mean']:.3f}  {time.perf_counter() - started:.1f} s"
                print(f"seed {seed}  {arm:9} {shown}", file=sys.stderr, flush=True)
        result: dict[str, Any] = {
            "workload": {
                n: getattr(given, n) for n in ("seeds", "steps", "prompts", "mini_steps", "lr", "dtype", "sft_steps")
            },
            "arms": summary(runs),
        }
    plugins = (f"miles-plugin-{name}" for name in ("r3", "tis", "fp8"))
    finish("r3_replication", result, given.save, lambda: installed("miles-core", *plugins, "torch", "transformers"))


if __name__ == "__main__":
    main()
