"""``miles simulate`` against real runs on this machine: the embedded engine on the CPU, in one process.

Runs with short and long responses at several batch sizes measure the speeds: the decode curve, the seconds per token of context, and the
training. The simulation then predicts runs with other batches, lengths and limits, whose
lengths it reads from their saved rollouts. Times are medians over the steps after the first two, on one thread, in seconds of the
processor instead of the clock: other programs on this machine then change them less. They still do, through caches and clock rates, so a
short reference run before and after each predicted run measures the machine's speed, by which the measured speeds are scaled (``scale``).

Run: ``python benchmarks/simulate_real.py --threads 1 --save`` (five minutes).
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import finish, installed, options

from miles_simulation.simulation import simulate
from miles_testing import toy_run

#: A small dense model, so that a step takes milliseconds.
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STEPS, WARM_UP, SAMPLES = 6, 2, 4
#: prompts per step of the runs that measure, and the longest responses of the two at each.
BATCHES, SHORT, LONG = (1, 4, 12, 32), 24, 100
#: prompts per step, limit on responses, temperature of the runs that are predicted. A higher temperature makes responses shorter.
PREDICTED = ((8, 96, 1.0), (24, 64, 1.0), (2, 192, 1.0), (16, 192, 1.0), (32, 128, 1.0))


def measure(directory: Path, prompts: int, longest: int, temperature: float = 1.0) -> dict[str, float]:
    """One real run: median seconds per step and of its phases, and its lengths."""
    made = toy_run(
        (),
        directory,
        steps=STEPS,
        family="qwen3",
        sizes=MODEL,
        rollout_batch_size=prompts,
        n_samples_per_prompt=SAMPLES,
        rollout_max_response_len=longest,
        rollout_temperature=temperature,
        lr=1e-6,
        log_level="error",
    )
    rows = made.metrics[WARM_UP:]
    lengths = [row["response_length"] for row in made.samples]
    phases = {
        name: statistics.median(row.get(f"time/{name}", 0.0) for row in rows) for name in ("step", "rollout", "sync")
    }
    return {
        **phases,
        "tokens": sum(lengths) / STEPS,
        "samples": prompts * SAMPLES,
        "prompt": statistics.fmean(len(row["tokens"]) - row["response_length"] for row in made.samples),
        "longest": statistics.fmean(
            max(lengths[i : i + prompts * SAMPLES]) for i in range(0, len(lengths), prompts * SAMPLES)
        ),
        "sum_of_squares": sum(n * n for n in lengths) / STEPS,
    }


def fit_curve(runs: list[dict[str, float]], file: Path) -> tuple[dict[str, Any], float]:
    """Least squares over the measured runs: a rollout takes fixed seconds, seconds per step by batch size, and seconds per token of
    context. Returns the curve and the fixed seconds."""
    batches = sorted({int(run["samples"]) for run in runs})
    # sum over steps of the context = sum over responses of n (prompt + n / 2)
    rows = [
        [1.0, run["prompt"] * run["tokens"] + run["sum_of_squares"] / 2]
        + [run["longest"] * (run["samples"] == batch) for batch in batches]
        for run in runs
    ]
    scale = np.array([1.0, 1e-4, *[1e-2] * len(batches)])  # so that the columns have similar sizes
    weights = np.array([1 / run["rollout"] for run in runs])[:, None]  # relative errors count
    (fixed, per_token, *seconds), *_ = np.linalg.lstsq(weights * np.array(rows) * scale, np.ones(len(runs)), rcond=None)
    curve = {
        "batches": batches,
        "seconds": [max(float(value) * 1e-2, 1e-6) for value in seconds],
        "per_token": max(float(per_token) * 1e-4, 0.0),
    }
    file.write_text(json.dumps(curve))
    return curve, max(float(fixed), 0.0)


def fit_training(runs: list[dict[str, float]]) -> tuple[float, float]:
    """Seconds per step and per token of everything except the rollout and the sync."""
    tokens = np.array([run["tokens"] + run["samples"] * run["prompt"] for run in runs])
    rest = np.array([run["step"] - run["rollout"] - run["sync"] for run in runs])
    (per_token, fixed), *_ = np.linalg.lstsq(np.stack([tokens, np.ones_like(tokens)], 1), rest, rcond=None)
    return max(float(fixed), 0.0), max(float(per_token), 0.0)


def reference(directory: Path, number: int) -> float:
    """Seconds of a step of the reference run."""
    return measure(directory / f"reference-{number}", BATCHES[2], SHORT)["step"]


def scaled(curve: dict[str, Any], speeds: dict[str, float], by: float, file: Path) -> dict[str, float]:
    """Write the curve in seconds of the machine's present speed; return the other speeds."""
    seconds = [by * value for value in curve["seconds"]]
    file.write_text(json.dumps(curve | {"seconds": seconds, "per_token": by * curve["per_token"]}))
    return {name: by * value for name, value in speeds.items()}


def predict(
    run: Path, curve: Path, prompts: int, longest: int, prompt: float, speeds: dict[str, float]
) -> dict[str, float]:
    """Simulate the run in ``run`` with its lengths."""
    flags: dict[str, Any] = {
        "--rollout-batch-size": prompts,
        "--n-samples-per-prompt": SAMPLES,
        "--rollout-max-response-len": longest,
        "--num-rollout": 12,
        "--lengths": f"run:{run}",
        "--prompt-lengths": f"constant:{max(1, round(prompt))}",
        "--decode-curve": curve,
        "--engine-gpus": 1,
        "--trainer-gpus": 1,
        "--prefill-seconds-per-token": 0,
        **speeds,
    }
    return simulate([str(word) for pair in flags.items() for word in pair]).summary()


def main() -> None:
    chosen = options(__doc__).parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(chosen.threads)
    time.perf_counter = time.process_time  # the clock of the run's phases
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary)
        runs = [
            measure(files / f"batch-{batch}-{longest}", batch, longest)
            for batch in BATCHES
            for longest in (SHORT, LONG)
        ]
        curve, start = fit_curve(runs, files / "curve.json")
        fixed, per_token = fit_training(runs)
        sync = statistics.median(run["sync"] for run in runs)
        speeds = {
            "--train-seconds-per-step": fixed + start,
            "--train-seconds-per-token": per_token,
            "--sync-seconds": sync,
        }
        rows, usual = [], runs[2 * 2]["step"]
        before = reference(files, 0)
        for number, (prompts, longest, temperature) in enumerate(PREDICTED, 1):
            directory = files / f"run-{prompts}-{longest}"
            real = measure(directory, prompts, longest, temperature)
            after = reference(files, number)
            by, before = (before + after) / 2 / usual, after
            there = scaled(curve, speeds, by, files / "scaled.json")
            found = predict(directory, files / "scaled.json", prompts, longest, real["prompt"], there)
            simulated = found["seconds_per_step"]
            rows.append(
                {
                    "prompts": prompts,
                    "longest": longest,
                    "mean_length": round(real["tokens"] / real["samples"], 1),
                    "scale": round(by, 3),
                    "measured": round(real["step"], 4),
                    "simulated": round(simulated, 4),
                    "error": round(simulated / real["step"] - 1, 3),
                    "measured_rollout": round(real["rollout"], 4),
                    "simulated_rollout": round(simulated * (1 - found["trainer_busy"]) - by * (sync - start), 4),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    result = {"rows": rows, "curve": curve, **{name.strip("-"): value for name, value in speeds.items()}}
    finish(Path(__file__).stem, result, chosen.save, lambda: installed("torch", "transformers"))


if __name__ == "__main__":
    main()
