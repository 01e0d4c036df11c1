"""``miles simulate`` against real runs on this machine: the embedded engine on the CPU, in one process.

Runs with short and long responses at several batch sizes (``MEASURED``) give the speeds, others (``PREDICTED``) are predicted. Each
rollout of the first ones is one equation: its seconds are the sum of the steps' seconds by batch size, which shrinks as responses end,
seconds per token of context, seconds per token of the prompts, and fixed seconds. Least squares solve them. The simulation then repeats the
lengths of a predicted run in their order (``--lengths replay:``). ``VARIANTS`` leave out one part of this at a time.

Times are means over the steps after the first two, on one thread, in seconds of the processor instead of the clock: other programs on this
machine then change them less. Because they still do, through caches and clock rates (the same run took up to half longer), measured and
predicted runs alternate, and of ``ROUNDS`` rounds the fastest counts for each run.

Run: ``python benchmarks/planning/simulate_real.py --threads 1 --save`` (five minutes).
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import finish, installed, options
from miles_planner.simulation.simulation import simulate
from miles_testing import toy_run

#: A small dense model, so that a step takes milliseconds.
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STEPS, WARM_UP, SAMPLES, ROUNDS = 6, 2, 4, 3
#: (prompts per step, longest response) of the measured runs and of the predicted runs.
MEASURED = ((1, 24), (32, 100), (4, 24), (12, 100), (12, 24), (4, 100), (32, 24), (1, 100))
PREDICTED = ((8, 96), (24, 64), (2, 192), (16, 192), (32, 128))
#: Batch sizes of the decode curve; between them it is linear.
KNOTS = (1, 4, 16, 48, 128)
#: What a prediction leaves out: the shrinking batch (as if each response were as long as the longest), the context, the prompts, the order
#: of the lengths.
VARIANTS = ("", "drain", "context", "prompts", "order")


@dataclass(frozen=True)
class Step:
    """One step of a real run: seconds, lengths of its responses, and tokens of its prompts, each counted once."""

    rollout: float
    sync: float
    rest: float
    lengths: tuple[int, ...]
    prompts: int

    @property
    def seconds(self) -> float:
        return self.rollout + self.sync + self.rest

    @property
    def tokens(self) -> int:
        """Tokens that the trainer computes."""
        return sum(self.lengths) + SAMPLES * self.prompts


def measure(directory: Path, prompts: int, longest: int) -> list[Step]:
    """Run for real; return the steps after the first ones."""
    made = toy_run(
        (),
        directory,
        steps=STEPS,
        family="qwen3",
        sizes=MODEL,
        rollout_batch_size=prompts,
        n_samples_per_prompt=SAMPLES,
        rollout_max_response_len=longest,
        lr=1e-6,
        log_level="error",
    )
    found, count = [], prompts * SAMPLES
    for number, row in enumerate(made.metrics[WARM_UP:], WARM_UP):
        samples = made.samples[number * count : (number + 1) * count]
        lengths = tuple(sample["response_length"] for sample in samples)
        whole = sum(len(sample["tokens"]) for sample in samples)
        rollout, sync = row["time/rollout"], row.get("time/sync", 0.0)
        rest = row["time/step"] - rollout - sync
        found.append(Step(rollout, sync, rest, lengths, (whole - sum(lengths)) // SAMPLES))
    return found


def equation(step: Step, without: str) -> list[float]:
    """Return the factors of a rollout: fixed seconds, seconds per token of the prompts, per token of context, and of steps at ``KNOTS``."""
    lengths = np.array(step.lengths)
    prompt = step.prompts * SAMPLES / len(lengths)
    context = float(sum(n * prompt + n * n / 2 for n in step.lengths))
    at = np.arange(lengths.max())
    batch = np.full(len(at), len(lengths)) if without == "drain" else (lengths[None, :] > at[:, None]).sum(1)
    steps = [float(np.interp(batch, KNOTS, np.eye(len(KNOTS))[i]).sum()) for i in range(len(KNOTS))]
    return [1.0, step.prompts * (without != "prompts"), context * (without != "context"), *steps]


def solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the factors' seconds, none negative, with the least sum of squared relative errors."""
    table, wanted = np.array(rows) / np.array(seconds)[:, None], np.ones(len(rows))
    size = np.abs(table).max(0)
    used = [i for i in range(table.shape[1]) if size[i] > 0]
    while True:
        found, *_ = np.linalg.lstsq(table[:, used] / size[used], wanted, rcond=None)
        if found.min() >= 0:
            break
        del used[int(found.argmin())]
    result = np.zeros(table.shape[1])
    result[used] = found / size[used]
    return [float(value) for value in result]


def fit_training(steps: Sequence[Step]) -> list[float]:
    """Return the seconds per step and per token of everything except the rollout and the sync."""
    return solve([[1.0, s.tokens] for s in steps], [s.rest for s in steps])


def fit(steps: Sequence[Step], without: str, file: Path) -> dict[str, Any]:
    """Return the speeds as options of ``miles simulate``; ``file`` is for the decode curve."""
    fixed, prefill, per_token, *curve = solve([equation(s, without) for s in steps], [s.rollout for s in steps])
    rest, train = fit_training(steps)
    curve = [max(value, 1e-6) for value in curve]
    file.write_text(json.dumps({"batches": KNOTS, "seconds": curve, "per_token": per_token}))
    return {
        "--decode-curve": file,
        "--prefill-seconds-per-token": prefill,
        "--train-seconds-per-step": fixed + rest,
        "--train-seconds-per-token": train,
        "--sync-seconds": statistics.fmean(s.sync for s in steps),
    }


def predict(run: Path, prompts: int, longest: int, speeds: dict[str, Any], without: str) -> float:
    """Return the simulated seconds per step of the run in ``run``, after the same first steps."""
    lengths = "run" if without == "order" else "replay"
    flags: dict[str, Any] = {
        "--rollout-batch-size": prompts,
        "--n-samples-per-prompt": SAMPLES,
        "--rollout-max-response-len": longest,
        "--num-rollout": STEPS,
        "--warm-up-steps": WARM_UP,
        "--lengths": f"{lengths}:{run}",
        "--prompt-lengths": f"{lengths}:{run}",
        "--engine-gpus": 1,
        "--trainer-gpus": 1,
        **speeds,
    }
    return simulate([str(word) for pair in flags.items() for word in pair]).summary()["seconds_per_step"]


def seconds_of(steps: Sequence[Step]) -> float:
    """Return the mean seconds of a step."""
    return statistics.fmean(step.seconds for step in steps)


def run_all(directory: Path) -> dict[tuple[int, int], list[Step]]:
    """Run everything for real, the measured runs between the predicted ones; return the steps of the fastest round by (prompts, longest)."""
    found: dict[tuple[int, int], list[Step]] = {}
    spread = [PREDICTED[i * len(PREDICTED) // len(MEASURED)] for i in range(len(MEASURED))]
    order = list(dict.fromkeys(each for pair in zip(MEASURED, spread, strict=True) for each in pair))
    for number in range(ROUNDS):
        for key in order:
            steps = measure(directory / f"{key[0]}-{key[1]}-{number}", *key)
            found[key] = min(found.get(key, steps), steps, key=seconds_of)
            print(*key, round(seconds_of(steps), 3), file=sys.stderr, flush=True)
    return found


def compare(found: dict[tuple[int, int], list[Step]], directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for each predicted run, and the fitted speeds."""
    base = [step for key in MEASURED for step in found[key]]
    speeds = {without: fit(base, without, directory / f"curve-{without}.json") for without in VARIANTS}
    rest, train = fit_training(base)
    rows = []
    for prompts, longest in PREDICTED:
        real, run = found[prompts, longest], directory / f"{prompts}-{longest}-0"
        seconds = seconds_of(real)
        errors = {w: predict(run, prompts, longest, speeds[w], w) / seconds - 1 for w in VARIANTS}
        length = statistics.fmean(n for s in real for n in s.lengths)
        row = {"prompts": prompts, "longest": longest, "mean_length": round(length, 1), "measured": round(seconds, 4)}
        row |= {"simulated": round(seconds * (1 + errors[""]), 4), "error": round(errors[""], 3)}
        trained = statistics.fmean(s.rest for s in real)
        row |= {
            "measured_training": round(trained, 4),
            "fitted_training": round(rest + train * statistics.fmean(s.tokens for s in real), 4),
        }
        rows.append(row | {"error_without": {w: round(errors[w], 3) for w in VARIANTS if w}})
        print(rows[-1], file=sys.stderr, flush=True)
    own = speeds[""]
    curve = json.loads(Path(own.pop("--decode-curve")).read_text())
    return rows, {"curve": curve, **{name.strip("-"): value for name, value in own.items()}}


def main() -> None:
    chosen = options(__doc__).parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(chosen.threads)
    time.perf_counter = time.process_time  # the clock of the run's phases
    with tempfile.TemporaryDirectory() as temporary:
        rows, speeds = compare(run_all(Path(temporary)), Path(temporary))
    worst = max(abs(row["error"]) for row in rows)
    result = {"worst": worst, "rows": rows, **speeds}
    finish(Path(__file__).stem, result, chosen.save, lambda: installed("torch", "transformers"))


if __name__ == "__main__":
    main()
