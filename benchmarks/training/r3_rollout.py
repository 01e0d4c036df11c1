"""Measures how much longer a rollout with SGLang takes with r3: two engines of the same model take turns; one records the routed experts.

No trainer takes part. ``plain`` records nothing. ``recording`` records, and no request asks for its record: the difference to ``plain`` is the cost
of recording in the decode steps. ``r3`` records and returns every record: the difference to ``recording`` is the cost of reading records and
sending them to the run. Groups of 8 requests share a prompt of 64 tokens; each response has ``--tokens`` tokens and log-probabilities. The prefix
cache is empty before each rollout, as after a sync. The order of the sides is reversed every second turn.

On a GPU ``--model moe`` is the rollout half of ``r3_overhead.py --gpu moe``; on a CPU ``--model tiny`` rehearses it. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.engine.checkpoints import VOCABULARY, make_model
from benchmarks.engine.sglang_engine import engine_for, generate, prompts
from benchmarks.measure import finish, installed, options
from benchmarks.training.r3_overhead import median_interval
from miles_core.engine import Sampling
from miles_r3 import ROUTES

#: Side -> whether its engine records, and the fields that its requests ask for.
SIDES: dict[str, tuple[bool, set[str]]] = {
    "plain": (False, set()),
    "recording": (True, set()),
    "r3": (True, {ROUTES.name}),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=["tiny", "moe"], default="tiny")
    parser.add_argument("--requests", type=int, default=256, help="of a rollout, a multiple of 8 (default: 256)")
    parser.add_argument("--tokens", type=int, default=256, help="of a response (default: 256)")
    parser.add_argument("--turns", type=int, default=16, help="measured rollouts of each side (default: 16)")
    parser.add_argument("--warm-up", type=int, default=2, help="unmeasured rollouts of each side (default: 2)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(given, Path(directory)))


async def measure(given: argparse.Namespace, work: Path) -> None:
    """Start both engines, and let the sides take turns; write the result after each turn."""
    checkpoint = make_model("moe" if given.model == "moe" else "tiny", work / "model")
    engines = {recording: make_engine(given, checkpoint, work, recording) for recording in (False, True)}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    try:
        await asyncio.gather(*(engine.start() for engine in engines.values()))
        for turn in range(given.warm_up + given.turns):
            for side in list(SIDES) if turn % 2 else list(SIDES)[::-1]:
                took = await rollout(given, engines[SIDES[side][0]], SIDES[side][1])
                if turn >= given.warm_up:
                    seconds[side].append(took)
            print(
                f"turn {turn + 1}: { ({s: round(t[-1], 3) for s, t in seconds.items() if t}) }",
                file=sys.stderr,
                flush=True,
            )
            if turn > given.warm_up:
                write(given, seconds, quiet=turn + 1 < given.warm_up + given.turns)
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines.values()))


def make_engine(given: argparse.Namespace, checkpoint: Path, work: Path, recording: bool) -> Any:
    """Return an engine that was not started; it may use a third of the GPU's memory."""
    arguments = {"precision": "bf16", "fp8_gemm": None, "bucket": 512, "eager": False, "deterministic": False}
    chosen: Any = SimpleNamespace(
        **arguments, model=given.model, routes=recording, batches=[64, given.requests], cached_tokens=100_000
    )
    return engine_for(checkpoint, chosen, work / f"sglang-{recording}")


async def rollout(given: argparse.Namespace, engine: Any, extras: set[str]) -> float:
    """Return the seconds of one rollout."""
    await engine.link.call("flush_cache", {})
    asked: Any = SimpleNamespace(requests=given.requests, vocabulary=VOCABULARY)
    responses, took = await generate(engine, prompts(asked), Sampling(given.tokens, ignore_eos=True), extras)
    assert all(len(response.tokens) == given.tokens and extras <= response.extras.keys() for response in responses)
    return took


def write(given: argparse.Namespace, seconds: dict[str, list[float]], quiet: bool) -> None:
    """Write the result of the turns so far."""
    ratios = {
        f"{side}_to_{base}": [b / a for a, b in zip(seconds[base], seconds[side], strict=True)]
        for base, side in (("plain", "recording"), ("recording", "r3"), ("plain", "r3"))
    }
    result = {
        "model": given.model,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "requests": given.requests,
        "tokens": given.tokens,
        "turns": len(seconds["plain"]),
        "seconds": {side: round(statistics.median(times), 4) for side, times in seconds.items()},
        "range": {side: [round(min(times), 4), round(max(times), 4)] for side, times in seconds.items()},
        "ratio_median": {name: round(statistics.median(values), 4) for name, values in ratios.items()},
        "ratio_median_interval": {n: [round(x, 4) for x in median_interval(values)] for n, values in ratios.items()},
    }
    versions = ("miles-core", "miles-plugin-r3", "torch", "sglang")
    variant = "" if given.model == "tiny" else f"gpu-{given.model}"
    finish("r3_rollout", result, given.save, lambda: installed(*versions), variant, quiet=quiet)


if __name__ == "__main__":
    main()
