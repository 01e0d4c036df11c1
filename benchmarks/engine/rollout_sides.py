"""Tokens per second of the embedded engine and of SGLang called directly, in turns on one GPU, with log-probabilities, over batch sizes.

Groups of 8 requests share a prompt of 64 tokens; every response has 256 tokens, or with ``--endings`` between 1 and 256, the same for every
side. The models are the random BF16 ones of ``sglang_engine.py``; ``fp8`` is the embedded engine with weights and activations in FP8.
SGLang answers in the process in which miles starts it (``sglang_direct.py``), one call per batch, its prefix cache emptied in front of it, with
CUDA graphs for the batch sizes. The first turn of each side is not counted. ``weight_bytes`` counts the memory of each embedded engine's
weights and codes. Results are written after every part. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoints import SIZES, make_model
from benchmarks.engine.embedded_rollout import PROMPT, Result, make_engine
from benchmarks.engine.sglang_engine import engine_for
from benchmarks.measure import commit, finish, installed, options
from miles_core.engine import Request, Sampling

SIDES = ("embedded", "fp8", "sglang")
Side = Callable[[Sequence[Request]], Awaitable[float]]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(SIZES), default=["dense", "moe"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["embedded", "sglang"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="requests in flight")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a response")
    parser.add_argument("--turns", type=int, default=3, help="measured turns (default: 3)")
    parser.add_argument(
        "--endings", action="store_true", help="also responses of unequal lengths, with the largest batch"
    )
    parser.add_argument("--share", type=float, default=0.3, help="SGLang's share of the GPU's memory (default: .3)")
    parser.add_argument(
        "--cached-tokens", type=int, default=200_000, help="tokens in SGLang's cache (default: 200,000)"
    )
    parser.add_argument("--sglang-python-path", default="", help="see miles train --help sglang-python-path")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--out", type=Path, help="write results here after every part")
    given = parser.parse_args()
    result = Result(given.out)
    result.put("device", torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    result.put("commit", commit())
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(given, Path(directory), result))
    packages = [
        "torch",
        "transformers",
        *(["sglang"] if "sglang" in given.sides and not given.sglang_python_path else []),
    ]
    name = "-".join(given.models) + given.variant
    finish("rollout_sides", result.found, given.save, lambda: installed(*packages), name)


async def measure(given: argparse.Namespace, work: Path, result: Result) -> None:
    """Every model, one after the other; all of SGLang starts first."""
    checkpoints = {model: make_model(model, work / model) for model in given.models}
    servers: dict[str, Any] = {}
    try:
        if "sglang" in given.sides:
            for model, checkpoint in checkpoints.items():
                servers[model] = engine_for(checkpoint, arguments_for(model, given), work / f"{model}-sglang")
            started = time.perf_counter()
            await asyncio.gather(*(server.start() for server in servers.values()))
            result.put("sglang_start_seconds", round(time.perf_counter() - started, 1))
        for model, checkpoint in checkpoints.items():
            result.put(model, {})
            await measure_model(given, model, checkpoint, servers.get(model), result)
    finally:
        await asyncio.gather(*(server.stop() for server in servers.values()))


def arguments_for(model: str, asked: argparse.Namespace) -> argparse.Namespace:
    """Arguments of ``sglang_engine.engine_for``, with a CUDA graph for each batch size. SGLang records no routed experts (results until
    2026-11-24: with the mixture of experts it did)."""
    given = argparse.Namespace(model=model, precision="bf16", fp8_gemm=None, bucket=512, routes=False)
    taken = {name: getattr(asked, name) for name in ("share", "cached_tokens", "sglang_python_path")}
    return argparse.Namespace(**vars(given), eager=False, deterministic=False, batches=sorted(asked.batches), **taken)


async def measure_model(given: argparse.Namespace, model: str, checkpoint: Path, server: Any, result: Result) -> None:
    """All batch sizes of one model."""
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sides: dict[str, Side] = {}
    weights: dict[str, int] = {}
    for side in given.sides:
        if side == "sglang":
            sides[side] = lambda asked: ask_sglang(server, asked)
        else:
            kind = "ahead" if side == "embedded" else side
            engine = await asyncio.to_thread(make_engine, kind, checkpoint, device)
            sides[side] = lambda asked, engine=engine: ask_embedded(engine, asked)  # type: ignore[misc]
            weights[side] = sum(
                {s.data_ptr(): s.nbytes() for t in engine.weight_tensors() for s in [t.untyped_storage()]}.values()
            )
    result.found[model]["load_seconds"] = round(time.perf_counter() - started, 2)
    result.found[model]["weight_bytes"] = weights
    gc.collect()
    gc.freeze()
    parts = [(f"batch_{n}", requests(n, given.tokens, False)) for n in given.batches]
    if given.endings:
        parts.append((f"endings_{max(given.batches)}", requests(max(given.batches), given.tokens, True)))
    for name, asked in parts:
        result.found[model][name] = await in_turns(sides, asked, given.turns)
        result.put(model, result.found[model])


def requests(count: int, tokens: int, endings: bool) -> list[Request]:
    generator, lengths = torch.Generator().manual_seed(1), random.Random(2)
    groups = torch.randint(2, 30000, (-(-count // 8), PROMPT), generator=generator).tolist()
    samplings = [Sampling(lengths.randint(1, tokens) if endings else tokens, ignore_eos=True) for _ in range(count)]
    return [Request(groups[i // 8], samplings[i], key=i, group=i // 8) for i in range(count)]


async def in_turns(sides: dict[str, Side], asked: Sequence[Request], turns: int) -> dict[str, Any]:
    """Tokens per second of each side, and what each is to the first."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(turns + 1):
        for side, ask in sides.items():
            seconds[side].append(await ask(asked))
    count = sum(request.sampling.max_new_tokens for request in asked)
    found = {
        side: {"tokens_per_second": round(count / statistics.median(s[1:])), "seconds": [round(x, 4) for x in s]}
        for side, s in seconds.items()
    }
    if "sglang" in found:
        for value in found.values():
            rate = value["tokens_per_second"] / found["sglang"]["tokens_per_second"]  # type: ignore[operator]
            value["to_sglang"] = round(rate, 3)
    return found


async def ask_embedded(engine: Any, asked: Sequence[Request]) -> float:
    """Seconds of all requests."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    responses = await asyncio.gather(*(engine.generate(request) for request in asked))
    took = time.perf_counter() - started
    assert all(len(r.log_probs) == q.sampling.max_new_tokens for r, q in zip(responses, asked, strict=True))
    return took


async def ask_sglang(server: Any, asked: Sequence[Request]) -> float:
    """Seconds of all requests, measured inside SGLang's process."""
    await server.link.call("flush_cache", {})
    sampling = [{"max_new_tokens": q.sampling.max_new_tokens, "temperature": 1.0, "ignore_eos": True} for q in asked]
    body = {"prompts": [list(q.tokens) for q in asked], "sampling": sampling, "each": False, "log_probs": True}
    return float(await server.link.call("direct", body | {"routes": False}))


if __name__ == "__main__":
    main()
