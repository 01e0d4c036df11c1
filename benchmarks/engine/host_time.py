"""Host time of the embedded engine's rollouts: 256 requests (32 prompts of 64 tokens x 8 samples) of 256 tokens, with a model that computes nothing.

Prompts and decode steps return prepared hidden states and tokens, so what remains is Python: admission, launching, reading, appending,
responses. It needs no GPU. Seconds are processor time of this process; the split is exclusive (see ``time_split.py``). ``--endings`` gives
responses lengths between 1 and ``--tokens``. ``--profile`` adds cProfile's table of functions. The last line is one JSON object.

    python benchmarks/engine/host_time.py --turns 5
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoints import make_model, word_tokenizer
from benchmarks.engine.embedded_rollout import requests
from benchmarks.measure import finish, installed, options
from benchmarks.time_split import TimeSplit
from benchmarks.training.loop_efficiency import watch_engine
from miles_core.engine import Request
from miles_embedded.engine.decoder import AsyncSteps
from miles_embedded.engine.detokenizer import Detokenizer
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model


def main() -> None:
    parser = options(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--endings", action="store_true", help="lengths of responses between 1 and --tokens")
    parser.add_argument("--profile", action="store_true", help="print a table of functions on standard error")
    given = parser.parse_args()
    torch.set_num_threads(1)
    split = TimeSplit(time.process_time)
    watch_engine(split)
    with tempfile.TemporaryDirectory() as directory:
        engine = make_engine(make_model("tiny_dense", Path(directory)))
    asked = requests(given.rows, given.tokens, given.endings)
    turns = [measure(engine, asked, split) for _ in range(given.turns + 1)][1:]
    found = {name: statistics.median(turn.get(name, 0.0) for turn in turns) for name in turns[-1]}
    if given.profile:
        with cProfile.Profile(time.process_time) as profiler:
            measure(engine, asked, split)
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(40)
    result = {
        "rows": given.rows,
        "tokens": given.tokens,
        "milliseconds": {n: round(1e3 * s, 2) for n, s in found.items()},
    }
    finish("host_time", result, given.save, lambda: installed("torch"))


def make_engine(checkpoint: Path) -> EmbeddedEngine:
    """Make an engine whose prompts have zeros as hidden states, and whose steps emit prepared tokens."""
    settings = Settings(Detokenizer(word_tokenizer()), cuda_graphs=True)
    engine = EmbeddedEngine(load_model(checkpoint, "float32", "cpu"), settings)
    engine.async_steps = steps = AsyncSteps(engine, used=True)
    steps._compared = True
    hidden, size = torch.zeros(1, 128), steps.batch.size
    engine.prompts.fill = lambda sequences, *_: (hidden.expand(len(sequences), -1), set())  # type: ignore[method-assign]
    engine.runner.head = lambda states: torch.zeros(len(states), 256)  # type: ignore[assignment]
    drawn = torch.stack([torch.randint(2, 32000, (64, size)).double(), -torch.rand(64, size).double()], 1)
    count = 0

    def run(shape: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        steps.batch.results.copy_(drawn[count % len(drawn)])
        return hidden

    steps.graphs.run = run  # type: ignore[method-assign]
    return engine


def measure(engine: EmbeddedEngine, asked: Sequence[Request], split: TimeSplit) -> dict[str, float]:
    """Return processor seconds of one rollout, in total and by phase."""

    async def run() -> list[Any]:
        return await asyncio.gather(*(engine.generate(request) for request in asked))

    split.take()
    started = time.process_time()
    responses = asyncio.run(run())
    total = time.process_time() - started
    assert [len(r.tokens) for r in responses] == [r.sampling.max_new_tokens for r in asked]
    assert not engine.async_steps.refused
    phases = split.take()
    return {"total": total, **phases, "driver": total - sum(phases.values())}


if __name__ == "__main__":
    main()
