"""Milliseconds of one decode step of the embedded engine, as the GPU replays it, and of a rollout's first tokens; BF16 and FP8 weights, on one GPU.

``step`` is a CUDA graph replayed in a row, so the host has no influence: use it to compare kernels, whose differences are smaller than those
between two rollouts. ``first_tokens`` is the time until all requests have one token, with the pass over the prompts as a CUDA graph, and
``first_tokens_plain`` the same with a pass whose kernels are launched one by one. Requests are those of ``rollout_sides.py``; steps have about 64 +
100 tokens per request in the cache. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoints import SIZES, make_model
from benchmarks.engine.embedded_rollout import make_engine
from benchmarks.engine.rollout_sides import requests
from benchmarks.measure import finish, installed, options

#: The first responses have ROOM tokens, so that the cache is large enough. Before a step is replayed, responses have BEFORE tokens; every replay
#: appends one.
ROOM, BEFORE, REPLAYS = 256, 100, 20
#: All numbers of rows that a step has up to 256, and a larger one (``miles_embedded.engine.static_step.padded_rows``).
BATCHES = [1, 2, 4, 8, 16, 32, 48, 64, 128, 192, 256, 512]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(SIZES), default=["dense", "moe"])
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="requests in flight")
    parser.add_argument("--turns", type=int, default=5, help="measurements; the median counts (default: 5)")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("decode_step.py measures a GPU, and torch sees none")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    with tempfile.TemporaryDirectory() as directory:
        for model in given.models:
            found[model] = measure(given, make_model(model, Path(directory) / model))
            print(f"{model}: {json.dumps(found[model])}", file=sys.stderr, flush=True)
    finish("decode_step", found, given.save, lambda: installed("torch", "triton", "transformers"), given.variant)


def measure(given: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """Milliseconds of both sides for each batch size, and how many times as fast an FP8 step is."""
    sides = {}
    for side, kind in (("bf16", "ahead"), ("fp8", "fp8")):
        engine = make_engine(kind, checkpoint, "cuda")
        ask(engine, max(given.batches), ROOM)
        sides[side] = {rows: measure_batch(given, engine, rows) for rows in given.batches}
    return {
        f"batch_{rows}": {side: sides[side][rows] for side in sides}
        | {"fp8_to_bf16": round(sides["bf16"][rows]["step"] / sides["fp8"][rows]["step"], 3)}
        for rows in given.batches
    }


def measure_batch(given: argparse.Namespace, engine: Any, rows: int) -> dict[str, float]:
    """Milliseconds of a step, and of the first tokens of so many requests."""
    firsts = {}
    for name, static in (("first_tokens", True), ("first_tokens_plain", False)):
        engine.prompts.used = static and not engine.prompts.refused
        seconds = [ask(engine, rows, 1) for _ in range(given.turns + 2)][2:]  # the second pass of a shape is recorded
        firsts[name] = round(1000 * statistics.median(seconds), 2)
    if engine.async_steps.refused or engine.prompts.refused:
        sys.exit(f"no CUDA graphs of {rows} requests: {engine.async_steps.refused or engine.prompts.refused}")
    steps = []
    for _ in range(given.turns):
        ask(engine, rows, BEFORE)
        graphs = engine.async_steps.graphs._recorded
        graph, _ = [recorded for shape, recorded in graphs.items() if shape.rows == rows][-1]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        steps.append(start.elapsed_time(end) / REPLAYS)
    return {"step": round(statistics.median(steps), 4), **firsts}


def ask(engine: Any, rows: int, tokens: int) -> float:
    """Generate ``tokens`` for so many requests; returns the seconds."""

    async def generate() -> None:
        await asyncio.gather(*(engine.generate(request) for request in requests(rows, tokens, False)))

    started = time.perf_counter()
    asyncio.run(generate())
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
