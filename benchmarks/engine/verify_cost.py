"""What a step that verifies k drafts a row costs, in steps without drafts, and so what drafts can gain at most on this machine.

The model is that of ``speculative.py`` with random weights, because times do not depend on them. In an engine with so many rows, every step feeds
one token per row, then two, three, ... (the last token over and over), each timed by the processor's own clock, and keeps nothing. ``ceiling`` is the
speed-up by a draft that costs nothing and of which every token is kept with probability ``--acceptance``: the best k's expected tokens over what
verifying them costs. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from statistics import quantiles
from typing import Any

import torch

from benchmarks.engine.drafting_model import drafting_model
from benchmarks.engine.languages import Language
from benchmarks.measure import finish, installed, options
from miles_core.engine import Request, Sampling
from miles_embedded.engine.decoder import PlainDecoder
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings

#: Tokens of each row before the first step.
PROMPT = 64


class Probe(PlainDecoder):
    """Steps without drafts, and before each the forwards of one with some.

    Args:
        most: drafts at most.
    """

    def __init__(self, most: int) -> None:
        #: [drafts] -> seconds
        self.seconds: list[list[float]] = [[] for _ in range(most + 1)]

    def step(self, engine: Any, rows: list[Any]) -> Any:
        lengths = [len(row.tokens) - 1 for row in rows]
        for k, seconds in enumerate(self.seconds):
            chains = [row.tokens[-1:] * (k + 1) for row in rows]
            start = time.process_time()
            _ = engine.forward(rows, chains).logits
            seconds.append(time.process_time() - start)
            engine.truncate(rows, lengths)
        return super().step(engine, rows)


def costs(model: Any, language: Language, rows: int, given: argparse.Namespace) -> list[float]:
    """Of a forward with 0, 1, ... drafts a row, in those without: lower quartiles, because other work only ever adds to a time."""
    settings = Settings(lambda tokens: "", eos=[1], max_running_requests=rows)
    probe = Probe(given.drafts)
    engine = EmbeddedEngine(model, settings, probe)
    sampling = Sampling(given.steps + 1, ignore_eos=True)
    requests = [Request(p, sampling, key=i) for i, p in enumerate(language.batch(rows, PROMPT).tolist())]

    async def run() -> None:
        await asyncio.gather(*map(engine.generate, requests))

    asyncio.run(run())
    each = [quantiles(seconds[2:], n=4)[0] for seconds in probe.seconds]
    return [round(seconds / each[0], 3) for seconds in each]


def main() -> None:
    """Run what the arguments ask for."""
    parser = options(__doc__)
    for name, default in (("layers", 8), ("hidden", 384), ("vocab", 256), ("drafts", 4), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--acceptance", type=float, default=0.75)
    parser.set_defaults(checkpoint=None, dtype="float32", device="cpu", threads=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, _ = drafting_model(given)
    found = {}
    for rows in map(int, given.batches.split(",")):
        cost = costs(model, Language(given.vocab, seed=1), rows, given)
        gains = [sum(given.acceptance**d for d in range(k + 1)) / cost[k] for k in range(len(cost))]
        found[rows] = {"cost": cost, "ceiling": round(max(gains), 3), "drafts": gains.index(max(gains))}
        print(rows, found[rows], file=sys.stderr, flush=True)
    result = {"parameters": sum(p.numel() for p in model.parameters()), "rows": found, "threads": given.threads}
    finish("verify_cost", result, given.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
