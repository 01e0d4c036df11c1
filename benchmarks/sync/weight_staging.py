"""Rollout tokens that a weight sync costs, with the engine paused for all of it and with the version staged before.

    python benchmarks/sync/weight_staging.py --save
    python benchmarks/sync/weight_staging.py --device cuda --hidden 2048 --layers 16 --save

An engine in another process generates a fixed number of tokens (requests in flight all the time, ``in_place`` pauses). Meanwhile its weights are
replaced several times. What the whole takes longer than without any sync, times the rate without, is what was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.measure import finish, installed
from miles_core.data import Encoded
from miles_core.engine import Request, Sampling
from miles_core.trainer import World
from miles_embedded.testing import ProcessEngine
from miles_testing import tiny_checkpoint
from miles_testing.stored import stored_units
from miles_zero_copy.transport import BucketTransport

MODES = ("no sync", "paused", "staged")


async def workload(
    engine: ProcessEngine, transport: BucketTransport, units: Sequence[Encoded], mode: str, given: argparse.Namespace
) -> tuple[float, float]:
    """Seconds until all tokens are there, and seconds of the pauses among them."""
    sampling = Sampling(given.tokens, temperature=1.0, ignore_eos=True)
    start = time.perf_counter()
    waiting = [
        asyncio.create_task(engine.generate(Request([3 + i % 50, 5, 7], sampling, key=i)))
        for i in range(given.requests)
    ]
    paused = 0.0
    for _ in range(0 if mode == "no sync" else given.syncs):
        await asyncio.sleep(given.every)
        version = engine.version + 1
        if mode == "staged":
            await transport.stage(iter(units), version)
        begin = time.perf_counter()
        await engine.pause("in_place")
        await transport.send(iter(units), version)
        await engine.resume()
        paused += time.perf_counter() - begin
    responses = await asyncio.gather(*waiting)
    assert all(len(r.tokens) == given.tokens for r in responses)
    return time.perf_counter() - start, paused


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All modes in turns, after one that is not counted."""
    sizes = {"hidden_size": given.hidden, "intermediate_size": 4 * given.hidden, "num_hidden_layers": given.layers}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = tiny_checkpoint("qwen3", directory, **sizes, max_position_embeddings=given.tokens + 8)
        units = [Encoded(u.name, {n: t.to(given.device) for n, t in u.parts.items()}) for u in stored_units(checkpoint)]
        limits = {"seed": 1, "max_context": given.tokens + 8, "max_running_requests": given.requests}
        engine = ProcessEngine(checkpoint, given.device, **limits)
        await engine.start()
        transports = {mode: BucketTransport(engine, World(), given.bucket, mode == "staged") for mode in MODES}
        found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        try:
            for turn in range(given.turns + 1):
                for mode in MODES:
                    one = await workload(engine, transports[mode], units, mode, given)
                    if turn:
                        found[mode].append(one)
        finally:
            for transport in transports.values():
                transport.close()
            await engine.stop()
    seconds = {mode: median(whole for whole, _ in runs) for mode, runs in found.items()}
    rate = given.tokens * given.requests / seconds["no sync"]
    rows = {
        mode: {
            "seconds": seconds[mode],
            "paused_a_sync": median(paused for _, paused in found[mode]) / given.syncs,
            "tokens_lost_a_sync": (seconds[mode] - seconds["no sync"]) * rate / given.syncs,
        }
        for mode in MODES[1:]
    }
    return {"nbytes": sum(u.nbytes for u in units), "tokens_a_second": rate, "modes": rows}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--syncs", type=int, default=4)
    parser.add_argument("--every", type=float, default=0.2, help="seconds between two syncs")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--bucket", type=int, default=512 << 20)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = {**{k: v for k, v in vars(given).items() if k != "save"}, **asyncio.run(measure(given))}
    for mode, row in result["modes"].items():
        print(
            f"{mode}: {row['tokens_lost_a_sync']:.0f} tokens lost a sync ({result['tokens_a_second']:.0f} tokens/s), paused for "
            f"{row['paused_a_sync'] * 1000:.1f} ms",
            flush=True,
        )
    gpu = "gpu" if given.device != "cpu" else ""
    finish("weight_staging", result, given.save, lambda: installed("torch", "transformers"), gpu)


if __name__ == "__main__":
    main()
