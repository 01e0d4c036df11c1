"""Engines with drafts and without that take turns step by step, and how fast each of them is."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from miles_core.engine import Request, Sampling
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_speculative.async_rounds import use_rounds
from miles_speculative.decoder import SpeculativeDecoder
from miles_speculative.head import Head
from miles_speculative.lookahead import Auto, Lookahead
from miles_speculative.report import rates
from miles_speculative.tree import TreeDecoder

#: Sides without drafts; what two of them differ by is the noise of the others' numbers.
PLAIN, AGAIN = "plain", "plain again"


def decoder(draft: Any, name: str) -> SpeculativeDecoder | None:
    """None for a side without drafts, else that of ``auto``, ``K`` or ``KxN``."""
    if name in (PLAIN, AGAIN):
        return None
    depth, _, width = name.partition("x")
    lookahead = Auto() if name == "auto" else Lookahead(int(depth))
    return TreeDecoder(draft, lookahead, int(width)) if width else SpeculativeDecoder(draft, lookahead)


def use(made: SpeculativeDecoder | None, engine: EmbeddedEngine) -> None:
    """Let an engine decode as a side does, as a run has it: chains of drafts in CUDA graphs on a GPU."""
    if made is not None:
        engine.decoder = made
    if made is not None and not isinstance(made, TreeDecoder):
        use_rounds(engine, made, engine.async_steps.used)


class Flat:
    """A draft whose distribution is flatter than it was."""

    def __init__(self, draft: Head, sharpness: float) -> None:
        self.draft, self.sharpness = draft, sharpness
        self.policy, self.parameters = draft.policy, draft.parameters

    def __call__(self, *given: Any) -> Tensor:
        return self.draft(*given)

    def logits(self, out: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        return self.draft.logits(out) * self.sharpness


def compared(
    model: Any, draft: Any, language: Any, given: argparse.Namespace, rows: int, temperature: float, names: list[str]
) -> dict[str, Any]:
    """All sides answer the same prompts at the same time, a step of one after a step of another, so that they see the same machine; a side
    keeps its decoder over the turns, and ``auto`` what it learned, before them too (``settle`` tokens a row). The first turn is not counted.
    Of each turn the lower quartiles are compared; ``turns`` are the lowest and the highest of these ratios, ``speedup`` their median."""
    decoders = {name: decoder(draft, name) for name in (PLAIN, AGAIN, *names)}
    prompts = [list(map(int, prompt)) for prompt in language.batch(rows, 16)]
    if "auto" in names:
        generate(model, prompts, given, temperature, {"auto": decoders["auto"]}, 0, given.settle)
    turns = [
        generate(model, prompts, given, temperature, decoders, seed, given.tokens) for seed in range(given.turns + 1)
    ]
    turns = turns[1:]
    result: dict[str, Any] = {"tokens_per_second": round(median(1 / turn[PLAIN].seconds for turn in turns), 1)}
    for name in (AGAIN, *names):
        ratios = [round(turn[PLAIN].seconds / turn[name].seconds, 3) for turn in turns]
        rest = {n: round(median(t[name].said.get(n, 0.0) for t in turns), 3) for n in turns[0][name].said}
        rest.pop("speedup", None)  # what the run itself would report
        result[name] = {"speedup": round(median(ratios), 3), "turns": [min(ratios), max(ratios)], **rest}
    return result


@dataclass
class Side:
    """What one side did in a turn: seconds of its steps by drafts, its tokens, and what its requests reported."""

    steps: dict[int, list[float]]
    tokens: int
    said: dict[str, float]

    @property
    def seconds(self) -> float:
        """A token. Steps with as many drafts take the lower quartile of their times, because other work on the machine only ever adds to it."""
        each = self.steps.values()
        took = sum(len(e) * (quantiles(e, n=4, method="inclusive")[0] if len(e) > 1 else e[0]) for e in each)
        return took / self.tokens


def generate(
    model: Any,
    prompts: list[list[int]],
    given: argparse.Namespace,
    temperature: float,
    decoders: dict[str, Any],
    seed: int,
    tokens: int,
) -> dict[str, Side]:
    """One turn of so many tokens a row; ``seed`` says in which order the sides step, because one finds in the processor's caches what the one
    before it left there."""
    sampling = Sampling(tokens, temperature=temperature, ignore_eos=True)
    requests = [Request(p, sampling, key=i) for i, p in enumerate(prompts)]
    engines, steps = {}, {}
    for name, made in random.Random(seed).sample(list(decoders.items()), len(decoders)):
        settings = Settings(lambda tokens: "", eos=[1], max_running_requests=len(prompts))
        engines[name] = EmbeddedEngine(model, settings)
        use(made, engines[name])
        steps[name] = timed(engines[name], given)

    async def run() -> list[Any]:
        return await asyncio.gather(*[asyncio.gather(*map(e.generate, requests)) for e in engines.values()])

    found = {}
    for name, responses in zip(engines, asyncio.run(run()), strict=True):
        said: dict[str, float] = {}
        for response in responses:
            for metric, value in response.metrics.items():
                said[metric] = said.get(metric, 0.0) + value
        found[name] = Side(steps[name], sum(len(r.tokens) for r in responses), rates(said) if said else {})
    return found


def timed(engine: EmbeddedEngine, given: argparse.Namespace) -> dict[int, list[float]]:
    """Seconds of the engine's steps from now on, prompts and bookkeeping included, by the drafts of each."""
    found: dict[int, list[float]] = {}
    step, count = engine._step, engine.decoder
    # on one CPU thread, the time of the processor: the time of the day also counts what others do with it
    clock = time.process_time if given.device == "cpu" and given.threads == 1 else time.perf_counter

    def drafted() -> float:
        return count.ledger._sums["lookahead"] if isinstance(count, SpeculativeDecoder) else 0.0

    def run() -> None:
        before, start = drafted(), clock()
        step()
        if given.device == "cuda":
            torch.cuda.synchronize()
        found.setdefault(int(drafted() - before), []).append(clock() - start)

    engine._step = run  # type: ignore[method-assign]
    return found
