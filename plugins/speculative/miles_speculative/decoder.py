"""The decoder: draft a chain for every row, verify all chains in one forward, keep what stands.

A row's draft keys and values cover its tokens but the last few: those whose hidden states the model has computed since. The first
draft forward of a step feeds these, so an entry that was made from the draft's own guess of a hidden state is replaced by the true one,
and what was rejected is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_embedded import Decoder, Emitted, Prompts, one_each, pick
from miles_speculative.head import Head
from miles_speculative.lookahead import Fixed
from miles_speculative.verify import verify

#: Streams of random numbers, see ``engine.uniform``: the token behind what is kept, whether a draft is kept, the drafts.
DRAW, KEEP, DRAFT = 0, 1, 2


class SpeculativeDecoder(Decoder):
    """Args:
    head: of the engine's model.
    lookahead: says how many tokens are drafted.
    """

    def __init__(self, head: Head, lookahead: Fixed) -> None:
        self.head, self.lookahead = head, lookahead
        #: row -> hidden states [m, hidden] in front of its last m tokens, which the draft was not fed yet
        self._fresh: dict[Any, Tensor] = {}

    def prompts(self, engine: Any, prompts: Prompts) -> None:
        before = torch.cat([torch.zeros_like(prompts.hidden[:1]), prompts.hidden[:-1]])
        before[prompts.positions == 0] = 0
        self.head(prompts.tokens, before, prompts.positions, prompts.call)

    def join(self, engine: Any, rows: Sequence[Any], hidden: Sequence[Tensor]) -> None:
        for row, state in zip(rows, hidden, strict=True):
            self._fresh[row] = state.unsqueeze(0)
            for name in (
                "drafted",
                "draft_steps",
                *(f"{w}_{d + 1}" for w in ("tried", "kept") for d in range(self.lookahead.most)),
            ):
                row.metrics.setdefault(name, 0.0)

    def leave(self, rows: Sequence[Any]) -> None:
        for row in rows:
            self._fresh.pop(row, None)

    def step(self, engine: Any, rows: list[Any]) -> Emitted:
        k = min(self.lookahead.choose(len(rows)), max(row.limit - len(row.tokens) for row in rows) - 1)
        if k < 1:
            return self._plain(engine, rows)
        drafts, q = self._draft(engine, rows, k)
        room = [min(k, row.limit - len(row.tokens) - 1) for row in rows]
        chains = [[row.tokens[-1], *d[:n]] for row, d, n in zip(rows, drafts.tolist(), room, strict=True)]
        fed = engine.forward(rows, chains)
        device = fed.hidden.device
        counts = torch.tensor([len(c) for c in chains], device=device)
        dist = engine.distribution(fed.logits, rows, counts)
        starts = [0, *accumulate(map(len, chains))]
        padded = torch.tensor(
            [[s + min(i, n) for i in range(k + 1)] for s, n in zip(starts, room, strict=False)], device=device
        )
        at = _lengths(rows, device).unsqueeze(1) + torch.arange(k + 1, device=device)
        keep, draw = engine.uniform(rows, at[:, :k], KEEP), engine.uniform(rows, at, DRAW)
        probs = dist.log_probs.exp()[padded]
        kept, behind = verify(probs, q, drafts, torch.tensor(room, device=device), keep, draw)
        return self._emit(engine, rows, chains, kept.tolist(), behind.tolist(), dist, counts, fed.hidden)

    def _plain(self, engine: Any, rows: list[Any]) -> Emitted:
        fed = engine.forward(rows, [row.tokens[-1:] for row in rows])
        sampled = one_each(engine.sample(fed.logits, rows))
        for row, state in zip(rows, fed.hidden, strict=True):
            self._fresh[row] = torch.cat([self._fresh[row], state.unsqueeze(0)])
        return sampled

    def _draft(self, engine: Any, rows: list[Any], k: int) -> tuple[Tensor, Tensor]:
        """k tokens for each row [rows, k], drawn from [rows, k, vocab]."""
        fresh = [self._fresh[row] for row in rows]
        counts, lengths = [len(f) for f in fresh], np.array([len(row.tokens) for row in rows])
        device = fresh[0].device
        call = engine.call(rows, counts, lengths - counts)
        tokens = torch.tensor([t for row, n in zip(rows, counts, strict=True) for t in row.tokens[-n:]], device=device)
        out = self.head(tokens, torch.cat(fresh), _positions(call, device), call)
        out = out.index_select(0, torch.tensor(counts, device=device).cumsum(0) - 1)
        at = torch.from_numpy(lengths).to(device)
        drafts, probs = [], []
        for depth in range(k):
            probs.append(engine.distribution(self.head.logits(out), rows).log_probs.exp())
            drafts.append(pick(probs[-1], engine.uniform(rows, at + depth, DRAFT)))
            if depth + 1 < k:
                call = engine.call(rows, [1] * len(rows), lengths + depth)
                out = self.head(drafts[-1], out, _positions(call, device), call)
        return torch.stack(drafts, 1), torch.stack(probs, 1)

    def _emit(
        self,
        engine: Any,
        rows: list[Any],
        chains: list[list[int]],
        kept: list[int],
        behind: list[int],
        dist: Any,
        counts: Tensor,
        hidden: Tensor,
    ) -> Emitted:
        """Cut the cache to what is kept, remember its hidden states, and say what was emitted."""
        new = [[*chain[1 : n + 1], token] for chain, n, token in zip(chains, kept, behind, strict=True)]
        # positions behind what is kept repeat its last token; they are cut off below
        flat = [
            t
            for chain, tokens in zip(chains, new, strict=True)
            for t in [*tokens, *tokens[-1:] * (len(chain) - len(tokens))]
        ]
        sampled = engine.record(dist, rows, torch.tensor(flat, device=hidden.device), counts)
        engine.truncate(rows, [len(row.tokens) + n for row, n in zip(rows, kept, strict=True)])
        spans, at = [], 0
        for row, chain, n in zip(rows, chains, kept, strict=True):
            self._fresh[row] = hidden[at : at + n + 1]
            spans.append(slice(at, at + n + 1))
            at += len(chain)
            _count(row.metrics, len(chain) - 1, n)
        return Emitted(
            new,
            [sampled.log_probs[s] for s in spans],
            None if sampled.supports is None else [sampled.supports[s] for s in spans],
            None if sampled.capped is None else [sampled.capped[s] for s in spans],
        )


def _count(metrics: dict[str, float], drafted: int, kept: int) -> None:
    if drafted:
        metrics["drafted"] += drafted
        metrics["draft_steps"] += 1
        for depth in range(1, drafted + 1):
            metrics[f"tried_{depth}"] += 1
            metrics[f"kept_{depth}"] += depth <= kept


def _lengths(rows: Sequence[Any], device: torch.device) -> Tensor:
    return torch.tensor([len(row.tokens) for row in rows], device=device)


def _positions(call: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(call.rows.positions).to(device)
