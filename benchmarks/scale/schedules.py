"""Steps a minute of the schedules, with responses of long-tailed lengths, and what partial rollouts gain.

The real loop runs with every schedule; engine and trainer only take time (``simulated.py``), on a clock that jumps from event to
event, because two cores cannot show two machines working at once. So the numbers say what waits for what, not how fast
anything computes, and are the same on every machine. Run: ``python benchmarks/scale/schedules.py --save`` (a minute).
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import logging
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.measure import finish, installed, options
from benchmarks.scale.simulated import COSTS, JumpingLoop
from miles_core.config.load import load
from miles_core.launch import launch
from miles_core.observe.metrics import read
from miles_core.run.prepare import apply_plan, prepare
from miles_testing.toy import toy_arguments

GROUPS, SAMPLES, STEPS, WARM_UP = 32, 8, 40, 5
OVER = 40  # prompts asked for where more are asked for than needed

PARTIAL = {"partial_rollout": True}
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, over-sampling": {"over_sampling_batch_size": OVER},
    "sync, over-sampling, partial": {"over_sampling_batch_size": OVER, **PARTIAL},
    "ahead": {"schedule": "ahead"},
    "ahead, over-sampling, partial": {"schedule": "ahead", "over_sampling_batch_size": OVER, **PARTIAL},
    **{
        f"async, staleness {n}, whole responses": {
            "schedule": "async",
            "max_weight_staleness": n,
            "partial_rollout": False,
        }
        for n in (1, 2, 4)
    },
    **{
        f"async, staleness {n}, {stale}": {"schedule": "async", "max_weight_staleness": n, "stale_samples": stale}
        for n in (1, 2, 4)
        for stale in ("drop", "train")
    },
}

WATCH = """
import asyncio
from miles_core.plugin import hookimpl

@hookimpl
def on_step(run):
    run.state.setdefault("at", []).append(asyncio.get_running_loop().time())
"""
REWARD = "async def reward(args, sample):\n    return sample.index % 2\n"


class JumpingPolicy(asyncio.DefaultEventLoopPolicy):
    """Every event loop is one that jumps."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return JumpingLoop()


def measure(directory: Path, **flags: Any) -> dict[str, Any]:
    """One run: simulated seconds a step, who was busy, and how old the samples were."""
    here = Path(__file__).parent
    words = toy_arguments(
        [str(here / "simulated.py"), str(directory / "watch.py")],
        directory / "run",
        STEPS,
        runtime="simulated",
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=SAMPLES,
        rollout_max_response_len=COSTS.longest,
        custom_rm_path=directory / "reward.py",
        log_level="error",
        **flags,
    )
    config = load(words)
    plan, catalogue = prepare(config)
    done = launch(apply_plan(config, plan), plan, catalogue, Console(file=io.StringIO()))
    at = done.run.state["at"]
    whole, records = at[-1] - at[WARM_UP - 1], read(done.run.directory / "metrics.jsonl")[WARM_UP:]
    return {
        "steps_per_minute": round(60 * (STEPS - WARM_UP) / whole, 3),
        "trainer_busy": round(done.parts[0].learner.busy / at[-1], 3),
        "engine_busy": round(done.parts[0].engine.busy / COSTS.slots / at[-1], 3),
        "length_mean": round(statistics.fmean(r["rollout/length_mean"] for r in records), 1),
        "staleness_mean": round(statistics.fmean(r.get("rollout/staleness_mean", 0.0) for r in records), 3),
        "staleness_max": max(r.get("rollout/staleness_max", 0.0) for r in records),
        "stale_tokens": round(statistics.fmean(r.get("rollout/stale_tokens", 0.0) for r in records), 3),
        "dropped_groups": sum(r.get("rollout/dropped_groups", 0.0) for r in records),
    }


def main() -> None:
    chosen = options(__doc__).parse_args()
    logging.disable(logging.WARNING)
    asyncio.set_event_loop_policy(JumpingPolicy())
    results: dict[str, Any] = {}
    for name, flags in MODES.items():
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary)
            (directory / "watch.py").write_text(WATCH)
            (directory / "reward.py").write_text(REWARD)
            results[name] = measure(directory, **flags)
        print(f"{name:36} {results[name]}", file=sys.stderr, flush=True)
    rate = {name: found["steps_per_minute"] for name, found in results.items()}
    gains = {
        "ahead_over_sync": rate["ahead"] / rate["sync"],
        "async_over_sync": rate["async, staleness 1, drop"] / rate["sync"],
        "async_whole_over_sync": rate["async, staleness 1, whole responses"] / rate["sync"],
        "partial_gain_in_sync": rate["sync, over-sampling, partial"] / rate["sync, over-sampling"],
        **{
            f"partial_gain_in_async_{n}": rate[f"async, staleness {n}, train"]
            / rate[f"async, staleness {n}, whole responses"]
            for n in (1, 2, 4)
        },
    }
    result = {
        "clock": "simulated",
        "costs": dataclasses.asdict(COSTS),
        "groups": GROUPS,
        "samples": SAMPLES,
        "steps": STEPS - WARM_UP,
        "modes": results,
        "gains": {name: round(value, 3) for name, value in gains.items()},
    }
    finish(Path(__file__).stem, result, chosen.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
