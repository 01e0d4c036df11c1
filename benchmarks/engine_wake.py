"""Seconds of a rollout of the embedded engine on a GPU that was awake, whose cache slept, and whose cache and weights slept.

Sleep frees the memory whose addresses the CUDA graphs of decode steps contain, so the first rollout afterwards records them again. 256 requests of
64 + 256 tokens on the random BF16 models of ``sglang_engine.py``, of equal lengths and with lengths between 1 and 256, which use more
graphs. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from embedded_rollout import make_engine, requests, rollout
from measure import finish, installed, options
from sglang_engine import make_model

from miles_core.data.unit import Unit
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.model.views import export


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=["dense", "moe", "tiny"], default="dense")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else device}
    with tempfile.TemporaryDirectory() as directory:
        engine = make_engine("ahead", make_model(given.model, Path(directory)), device)
    for name, endings in (("equal", False), ("unequal", True)):
        asked = requests(given.requests, given.tokens, endings)
        result[name] = measure(engine, asked, given.turns)
    finish("engine_wake", result, given.save, lambda: installed("torch", "transformers"), given.model)


def measure(engine: EmbeddedEngine, asked: Any, turns: int) -> dict[str, Any]:
    """Median seconds of each kind of rollout, and the number of graphs that the last one recorded."""
    kept = {name: tensor.clone() for unit in export(engine.model) for name, tensor in unit.tensors.items()}
    rollout(engine, asked)
    rollout(engine, asked)
    seconds: dict[str, list[float]] = {"awake": [], "cache_slept": [], "both_slept": []}
    for _ in range(turns):
        seconds["awake"].append(rollout(engine, asked))
        asyncio.run(sleep_cache(engine))
        seconds["cache_slept"].append(rollout(engine, asked))
        asyncio.run(sleep_all(engine, kept))
        seconds["both_slept"].append(rollout(engine, asked))
    found: dict[str, Any] = {name: round(statistics.median(each), 4) for name, each in seconds.items()}
    return found | {"graphs": len(engine.async_steps.graphs._recorded)}


async def sleep_cache(engine: EmbeddedEngine) -> None:
    await engine.sleep(["cache"])
    await engine.wake(["cache"])


async def sleep_all(engine: EmbeddedEngine, kept: dict[str, torch.Tensor]) -> None:
    await engine.sleep()
    await engine.wake()
    units = engine.codec.encode(Unit({name: tensor}) for name, tensor in kept.items())
    await engine.update_weights(units, engine.version + 1)


if __name__ == "__main__":
    main()
