"""Tokens per second of the embedded engine on one GPU: plain steps, CUDA graphs, and graphs launched one step ahead, in turns.

256 requests (32 prompts x 8 samples, 64 + 256 tokens, log-probabilities included) on the random BF16 models of ``sglang_engine.py``.
``--batches`` measures other numbers of requests, ``--endings`` responses of unequal length, and ``--profile N`` shows what N decode
steps of each side consist of: kernels by name, launches, and the time in which the GPU waits for the host. Results are written after
every part, so a run that is cut off leaves what it measured. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoints import make_model
from benchmarks.measure import finish, installed, options
from miles_core.data.weight_unit import WeightUnit
from miles_core.engine import Request, Sampling
from miles_core.precision.products import Products
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model
from miles_embedded.model.views import export
from miles_formats import FormatCodec

SIDES = ("plain", "graphs", "ahead", "fp8")
PROMPT = 64


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=["dense", "moe", "tiny"], default="dense")
    parser.add_argument("--checkpoint", type=Path, help="measure this checkpoint instead")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES[:3]))
    parser.add_argument("--batches", type=int, nargs="+", default=[256], help="requests in flight")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a response")
    parser.add_argument("--turns", type=int, default=3, help="measured turns (default: 3)")
    parser.add_argument("--endings", action="store_true", help="lengths of responses between 1 and --tokens")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="decode steps to look into")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--out", type=Path, help="write results here after every part")
    given = parser.parse_args()
    result = Result(given.out)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = given.checkpoint or make_model(given.model, Path(directory))
        measure(given, checkpoint, result)
    finish(
        "embedded_rollout",
        result.found,
        given.save,
        lambda: installed("torch", "transformers"),
        given.model + given.variant,
    )


class Result:
    """What was measured so far, on standard error and in a file."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.found = path, dict[str, Any]()

    def put(self, part: str, value: Any) -> None:
        self.found[part] = value
        print(f"{part}: {json.dumps(value)}", file=sys.stderr, flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1))


def measure(given: argparse.Namespace, checkpoint: Path, result: Result) -> None:
    """All parts."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result.put("device", torch.cuda.get_device_name() if device == "cuda" else device)
    result.put("model", str(given.checkpoint or given.model))
    started = time.perf_counter()
    engines = {side: make_engine(side, checkpoint, device) for side in given.sides}
    result.put("load_seconds", round(time.perf_counter() - started, 2))
    parameters = sum(p.numel() for p in next(iter(engines.values())).model.parameters())
    result.put("parameters", parameters)
    for batch in given.batches:
        asked = requests(batch, given.tokens, given.endings)
        result.put(f"batch_{batch}", in_turns(engines, asked, given.turns))
    for side, engine in engines.items():
        result.put(f"refused_{side}", engine.async_steps.refused or engine.prompts.refused)
        if given.profile and device == "cuda":
            result.put(
                f"profile_{side}", profile(engine, requests(given.batches[0], given.tokens, False), given.profile)
            )


def make_engine(side: str, checkpoint: Path, device: str, dtype: str = "bfloat16") -> EmbeddedEngine:
    """An engine with weights of its own."""
    model = load_model(checkpoint, dtype, device)
    settings = Settings(lambda tokens: "", cuda_graphs=side != "plain")
    if side == "fp8":
        from miles_fp8.format import Fp8

        settings.codec, settings.products = FormatCodec(Fp8()), Products("native")
    engine = EmbeddedEngine(model, settings)
    if side == "fp8":
        units = [WeightUnit({name: tensor}) for unit in export(model) for name, tensor in unit.tensors.items()]
        asyncio.run(engine.update_weights(settings.codec.encode(units), 1))
    if side == "graphs":
        engine.async_steps._next = lambda launched, rows: None  # type: ignore[method-assign]
    return engine


def requests(count: int, tokens: int, endings: bool) -> list[Request]:
    """Groups of 8 requests share a prompt."""
    generator, lengths = torch.Generator().manual_seed(1), random.Random(2)
    groups = torch.randint(2, 250, (-(-count // 8), PROMPT), generator=generator).tolist()
    samplings = [Sampling(lengths.randint(1, tokens) if endings else tokens, ignore_eos=True) for _ in range(count)]
    return [Request(groups[i // 8], samplings[i], key=i, group=i // 8) for i in range(count)]


def in_turns(engines: dict[str, EmbeddedEngine], asked: Sequence[Request], turns: int) -> dict[str, Any]:
    """Tokens per second of each side; the first turn is not counted, but its seconds are kept: it records graphs."""
    seconds: dict[str, list[float]] = {side: [] for side in engines}
    count = sum(request.sampling.max_new_tokens for request in asked)
    for _ in range(turns + 1):
        for side, engine in engines.items():
            seconds[side].append(rollout(engine, asked))
    return {
        side: {
            "tokens_per_second": round(count / statistics.median(found[1:])),
            "seconds": [round(s, 4) for s in found],
        }
        for side, found in seconds.items()
    }


def rollout(engine: EmbeddedEngine, asked: Sequence[Request]) -> float:
    """Seconds until every request has its response."""

    async def run() -> None:
        await asyncio.gather(*(engine.generate(request) for request in asked))

    wait(engine)
    started = time.perf_counter()
    asyncio.run(run())
    wait(engine)
    return time.perf_counter() - started


def wait(engine: EmbeddedEngine) -> None:
    if engine.runner.device.type == "cuda":
        torch.cuda.synchronize()


# -- where a step's time goes -------------------------------------------------------------------------------------------


def profile(engine: EmbeddedEngine, asked: Sequence[Request], steps: int, first: int = 16) -> dict[str, Any]:
    """Of ``steps`` decode steps behind the ``first``: microseconds a step, of kernels and of the GPU without any."""
    kinds = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(activities=[kinds.CUDA, kinds.CPU])
    wall = 0.0

    async def watch() -> None:
        nonlocal wall
        await length(first)
        profiler.start()
        started = time.perf_counter()
        await length(first + steps)
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
        profiler.stop()

    async def length(tokens: int) -> None:
        while not engine.rows or len(engine.rows[0].response) < tokens:
            await asyncio.sleep(0)

    async def run() -> None:
        await asyncio.gather(watch(), *(engine.generate(request) for request in asked))

    asyncio.run(run())
    return breakdown(profiler, wall, steps)


def breakdown(profiler: torch.profiler.profile, wall: float, steps: int) -> dict[str, Any]:
    """The table of one profile."""
    kernels = [
        (e.time_range.start, e.time_range.end, e.name)
        for e in profiler.events() or ()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels.sort()
    busy, until = 0.0, float("-inf")
    time_of, count_of = defaultdict[str, float](float), defaultdict[str, int](int)
    for start, end, name in kernels:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        short = name.replace("void ", "").replace("at::native::", "")[:100]
        time_of[short] += end - start
        count_of[short] += 1
    table = sorted(time_of.items(), key=lambda item: -item[1])[:40]
    return {
        "steps": steps,
        "wall_us": round(1e6 * wall / steps, 1),
        "busy_us": round(busy / steps, 1),
        "kernels": round(len(kernels) / steps, 1),
        "table": [
            {"us": round(us / steps, 1), "count": round(count_of[name] / steps, 1), "name": name} for name, us in table
        ],
    }


if __name__ == "__main__":
    main()
