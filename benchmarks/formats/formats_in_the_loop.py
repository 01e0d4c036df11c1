"""Does reinforcement learning in a number format reach what BF16 reaches, and how far apart are engine and trainer?

Run: ``python benchmarks/formats/formats_in_the_loop.py --save`` (some minutes). The demo's task and model; for every seed one
supervised warm start, then the same short reinforcement learning from it in every mode, emulated on a CPU. The last line
of the output is one JSON object: held-out accuracy at the end with 95 % intervals over seeds, its difference from BF16
paired by seed, and the train/rollout log-probability gap of each mode. A second BF16 run of every seed, from the same start with
other prompts and samples, shows what such a difference is worth.
"""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options

GROUP = ["--int4-group-size", "32"]  # what divides every K of the demo's model (64)
STEPS = 40
OTHER = "bf16, other samples"
MODES: dict[str, list[str]] = {
    "bf16": [],
    OTHER: [],
    "fp8 rollout, bf16 train": ["--rollout-fp8"],
    "fp8 unified": ["--rollout-fp8", "--train-fp8"],
    "mxfp8 unified": ["--rollout-mxfp8", "--train-mxfp8"],
    "nvfp4 unified": ["--rollout-nvfp4", "--train-nvfp4"],
    "int4 rollout, QAT off": ["--rollout-int4", *GROUP],
    "int4 rollout, QAT on": ["--rollout-int4", "--train-int4", *GROUP],
}
#: Unified mode -> the mode with the same rollout and BF16 training.
MIXED = {"fp8 unified": "fp8 rollout, bf16 train", "int4 rollout, QAT on": "int4 rollout, QAT off"}
#: Two-sided 95 % quantiles of Student's t, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode (2 to 10)")
    parser.add_argument("--steps", type=int, default=STEPS, help="reinforcement-learning steps")
    parser.add_argument("--warm-start", type=int, default=500, help="supervised steps before them")
    parser.add_argument("--jobs", type=int, default=1, help="seeds worked on at the same time")
    chosen = parser.parse_args()
    with ProcessPoolExecutor(chosen.jobs, get_context("spawn")) as pool:
        work = partial(every_mode, steps=chosen.steps, warm=chosen.warm_start, threads=chosen.threads)
        runs = list(pool.map(work, range(chosen.seeds)))
    found = {name: [run[name] for run in runs] for name in MODES}
    modes = {name: summary(runs, found["bf16"]) for name, runs in found.items()}
    ratios = {name: round(modes[mixed]["gap"] / modes[name]["gap"], 1) for name, mixed in MIXED.items()}
    for name, row in modes.items():
        print(f"{name:<26} {row}", file=sys.stderr)
    result = {"seeds": chosen.seeds, "steps": chosen.steps, "modes": modes, "gap_ratio_mixed_to_unified": ratios}
    variant = "" if chosen.steps == STEPS else f"{chosen.steps}-steps"
    finish(Path(__file__).stem, result, chosen.save, lambda: installed("miles-core", "torch", "transformers"), variant)


def every_mode(seed: int, steps: int, warm: int, threads: int) -> dict[str, dict[str, float]]:
    """One seed: its warm start, then every mode from it."""
    import torch

    torch.set_num_threads(threads)
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        start = warm_start(Path(directory), seed, warm)
        for name, flags in MODES.items():
            samples = seed + 1000 if name == OTHER else seed
            found[name] = learn(start, name, flags, samples, steps)
            print(f"seed {seed}  {name:<26}", found[name], file=sys.stderr, flush=True)
    return found


def warm_start(directory: Path, seed: int, steps: int) -> Path:
    """Model, data and a supervised start without quantisation; the directory with ``model/`` replaced by its result."""
    from miles_tools.demo.inputs import make_inputs

    make_inputs(directory, seed)
    flags = ["--hf-checkpoint", str(directory / "model"), "--sft-data", str(directory / "data/demonstrations.jsonl")]
    flags += ["--sft-steps", str(steps), "--num-rollout", "0", "--export-hf", str(directory / "start")]
    train(directory, "warm start", flags, seed)
    return directory


def learn(directory: Path, name: str, flags: Sequence[str], seed: int, steps: int) -> dict[str, float]:
    """One run: accuracy at its end, and the means of its gap and seconds over all steps."""
    more = ["--hf-checkpoint", str(directory / "start"), "--num-rollout", str(steps), "--emulate-precision", *flags]
    more += ["--eval-interval", str(steps), "--n-samples-per-eval-prompt", "4"]
    metrics = train(directory, name, more, seed)
    trained = [m for m in metrics if "mismatch/abs_log_prob" in m]
    accuracy = next(m["eval/accuracy"] for m in reversed(metrics) if "eval/accuracy" in m)
    return {
        "accuracy": round(accuracy, 4),
        "gap": statistics.mean(m["mismatch/abs_log_prob"] for m in trained),
        "seconds": round(statistics.median(m["time/rollout"] + m["time/train"] for m in trained), 4),
    }


def train(directory: Path, name: str, flags: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """An ordinary ``miles train`` with the demo's configuration; its metrics."""
    from miles_core.cli import train as command
    from miles_core.observe.metrics import read
    from miles_tools.demo.inputs import CONFIG

    save, data = directory / name.replace(" ", "-"), directory / "data"
    words = ["--config", str(CONFIG), "--save", str(save), "--prompt-data", str(data / "train.jsonl")]
    words += ["--eval-prompt-data", str(data / "held_out.jsonl"), "--seed", str(seed), "--log-level", "error", *flags]
    shutil.rmtree(save, ignore_errors=True)  # of a run that was stopped
    with redirect_stdout(sys.stderr):
        if command.run(words):
            raise SystemExit(f"{name} was stopped")
    return read(save / "metrics.jsonl")


def summary(runs: Sequence[dict[str, float]], plain: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Means over seeds, with the half-widths of 95 % intervals."""
    differences = [a["accuracy"] - b["accuracy"] for a, b in zip(runs, plain, strict=True)]
    mean, width = interval([r["accuracy"] for r in runs])
    difference, within = interval(differences)
    return {
        "accuracy": round(mean, 4),
        "accuracy_interval": round(width, 4),
        "minus_bf16": round(difference, 4),
        "minus_bf16_interval": round(within, 4),
        "gap": float(f"{statistics.mean(r['gap'] for r in runs):.3g}"),
        "gap_range": [float(f"{f(r['gap'] for r in runs):.3g}") for f in (min, max)],
        "seconds": round(statistics.mean(r["seconds"] for r in runs), 4),
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half-width of the 95 % interval of the mean."""
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), STUDENT[len(values) - 1] * spread


if __name__ == "__main__":
    main()
