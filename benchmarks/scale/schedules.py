"""Steps a minute of the schedules, with responses of long-tailed lengths, and what partial rollouts gain.

``miles simulate`` runs the real loop with every schedule on a virtual clock, with one engine and one trainer, because two cores cannot show two
machines working at once. So the numbers say what waits for what, not how fast anything computes, and are the same on every
machine. Run: ``python benchmarks/scale/schedules.py --save`` (a minute).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from miles_planner.simulation.simulation import simulate

#: Seconds of a decode step, whatever its batch.
DECODE = 0.2
FLAGS = {
    "rollout-batch-size": 32,
    "n-samples-per-prompt": 8,
    "num-rollout": 40,
    "warm-up-steps": 5,
    "max-running-requests": 128,
    "rollout-max-response-len": 1024,
    "lengths": "lognormal:50,1.0",
    "prompt-lengths": "constant:8",
    "resolution": 1024,  # the driver counts every token
    "engine-gpus": 1,
    "trainer-gpus": 1,
    "parameters": 1e9,
    "cache-tokens": 1_000_000,
    "prefill-seconds-per-token": DECODE / 200,
    "train-seconds-per-token": 0.0016,
    "sync-seconds": 2,
}
OVER = "--over-sampling-batch-size 40"
STALENESS = (1, 2, 4)
MODES = {
    "sync": "",
    "sync, over-sampling": OVER,
    "sync, over-sampling, partial": f"{OVER} --partial-rollout",
    "ahead": "--schedule ahead",
    "ahead, over-sampling, partial": f"--schedule ahead {OVER} --partial-rollout",
    **{
        f"async, staleness {n}, whole responses": f"--schedule async --max-weight-staleness {n} --no-partial-rollout"
        for n in STALENESS
    },
    **{
        f"async, staleness {n}, {stale}": f"--schedule async --max-weight-staleness {n} --stale-samples {stale}"
        for n in STALENESS
        for stale in ("drop", "train")
    },
}
KEPT = ("trainer_busy", "engine_busy", "running", "length_mean", "staleness_mean", "staleness_max", "stale_tokens")


def measure(flags: list[str]) -> dict[str, float]:
    """Simulate one run; return its summary."""
    summary = simulate(flags).summary()
    kept = {name: round(summary[name], 3) for name in (*KEPT, "dropped_groups")}
    return {"steps_per_minute": round(60 / summary["seconds_per_step"], 3), **kept}


def main() -> None:
    chosen = options(__doc__).parse_args()
    flags = [f"--{name}={value}" for name, value in FLAGS.items()]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        curve = Path(directory) / "decode.json"
        curve.write_text(json.dumps({"batches": [1, 128], "seconds": [DECODE, DECODE]}), encoding="utf-8")
        for name, words in MODES.items():
            results[name] = measure([*flags, f"--decode-curve={curve}", *words.split()])
            print(f"{name:36} {results[name]}", file=sys.stderr, flush=True)
    rate = {name: found["steps_per_minute"] for name, found in results.items()}
    gains = {
        "ahead_over_sync": rate["ahead"] / rate["sync"],
        "async_over_sync": rate["async, staleness 1, drop"] / rate["sync"],
        "partial_gain_in_sync": rate["sync, over-sampling, partial"] / rate["sync, over-sampling"],
        **{
            f"partial_gain_in_async_{n}": rate[f"async, staleness {n}, train"]
            / rate[f"async, staleness {n}, whole responses"]
            for n in STALENESS
        },
    }
    result = {
        "flags": FLAGS,
        "decode_seconds": DECODE,
        "modes": results,
        "gains": {name: round(value, 3) for name, value in gains.items()},
    }
    finish("schedules", result, chosen.save, lambda: installed("miles-core"))


if __name__ == "__main__":
    main()
