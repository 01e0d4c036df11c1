"""A step with drafts over static buffers: draft, verify, and store the inputs of the next step.

It computes what ``decoder`` computes from Python, without reading a number from the host, so that a CUDA graph can replay it: a step of small
models is otherwise limited by the hundreds of launches that each draft adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_embedded import Params, StaticBatch, StaticCall, distribution, field_slab, pick, text_configuration, uniform
from miles_speculative.draft import Draft
from miles_speculative.verify import verify

#: Random streams, see ``engine.uniform``: the token after the accepted drafts, acceptance of drafts, the drafts.
DRAW, KEEP, DRAFT = 0, 1, 2


@dataclass(frozen=True)
class DraftedShape:
    """Properties that require a separate recording of a step.

    Attributes:
        rows: rows of the batch, padding included.
        drafts: draft tokens per row; 0 is a step without drafts.
        mixed: whether some rows may be greedy.
        names: recorded fields to keep if modules record them.
    """

    rows: int
    drafts: int
    mixed: bool
    names: frozenset[str]


class DraftedStep:
    """A step of ``runner``'s model with drafts of ``draft``.

    Args:
        runner: the engine's runner.
        batch: the rows; see ``StaticBatch``.
        draft: the draft of the runner's model.
        most: largest number of drafts per step.
        seed: the run's seed.

    Attributes:
        limits: [size] int64, number of tokens at which each row ends.
        hidden: [size, most + 1, hidden], the policy's states before the last ``fresh`` tokens of each row, which the draft has not processed.
        unread: [size, most + 1] int64, these tokens, the last one included.
        fresh: [size] int64, their number, at least 1.
        results: [2, size, most + 1] float64, emitted tokens and their log-probabilities.
        kept: [size] int64, accepted drafts of each row; one more token is emitted.
    """

    def __init__(self, runner: Any, batch: StaticBatch, draft: Draft, most: int, seed: int) -> None:
        self.runner, self.batch, self.draft, self.seed, self.width = runner, batch, draft, seed, most + 1
        self.device = runner.device
        size, like = batch.size, next(runner.model.parameters())
        integers = {"dtype": torch.int64, "device": self.device}
        self.limits, self.kept = torch.zeros(size, **integers), torch.zeros(size, **integers)
        self.fresh = torch.ones(size, **integers)
        self.unread = torch.zeros(size, self.width, **integers)
        self.hidden = torch.zeros(
            size, self.width, text_configuration(runner.model).hidden_size, dtype=like.dtype, device=self.device
        )
        self.results = torch.zeros(2, size, self.width, dtype=torch.float64, device=self.device)

    @property
    def cache(self) -> Any:
        """The runner's cache, which is replaced when it is cleared."""
        return self.runner.cache

    @torch.no_grad()
    def __call__(self, shape: DraftedShape) -> Tensor:
        """Write ``results`` and ``kept``, and advance the batch; returns ``results``."""
        batch, count, k = self.batch, shape.rows, shape.drafts
        params = batch.params(count, shape.mixed)
        length = batch.prompt_lengths[:count] + batch.lengths[:count] + 1  # tokens of each row
        drafted = self._draft(count, k, params, length) if k else None
        chain = (
            batch.tokens[:count, None] if drafted is None else torch.cat([batch.tokens[:count, None], drafted[0]], 1)
        )
        hidden, logits = self._feed_policy(chain, shape)
        dist = distribution(logits, params.repeat(k + 1))
        probs = dist.log_probs.exp().view(count, k + 1, -1)
        draw = uniform(self.seed, batch.keys[:count, None], length[:, None] + self._arange(k + 1), DRAW)
        if drafted is None:
            kept, behind = torch.zeros_like(length), pick(probs[:, 0], draw[:, 0])
            new = behind[:, None]
        else:
            drafts, q = drafted
            keep = uniform(self.seed, batch.keys[:count, None], length[:, None] + self._arange(k), KEEP)
            room = (self.limits[:count] - length - 1).clamp(0, k)
            kept, behind = verify(probs, q, drafts, room, keep, draw)
            padded = torch.cat([drafts, behind[:, None]], 1)
            new = torch.where(self._arange(k + 1) < kept[:, None], padded, behind[:, None])
        index = new.clamp(max=self.runner.vocabulary - 1)
        log_probs = dist.full.view(count, k + 1, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        self.results[0, :count, : k + 1], self.results[1, :count, : k + 1] = new.double(), log_probs.double()
        self.kept[:count] = kept
        self._advance(count, hidden, index, kept)
        return self.results

    def _draft(self, count: int, k: int, params: Params, length: Tensor) -> tuple[Tensor, Tensor]:
        """Draft k tokens per row; returns the tokens [rows, k] and the draft distributions [rows, k, vocab]."""
        batch, fresh, width = self.batch, self.fresh[:count], self.width
        # Places after the unread tokens hold old ones. The entries that the draft stores for them are overwritten before any query sees them.
        call = self._call(count, width, batch.lengths[:count] - fresh + 1)
        out = self.draft(self.unread[:count].flatten(), self.hidden[:count].flatten(0, 1), call.positions, call)
        out = out.view(count, width, -1)[batch.index[:count], fresh - 1]
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        for depth in range(k):
            probs.append(distribution(self.draft.logits(out), params).log_probs.exp())
            u = uniform(self.seed, batch.keys[:count], length + depth, DRAFT)
            drafts.append(pick(probs[-1], u).clamp(max=self.runner.vocabulary - 1))
            if depth + 1 < k:
                call = self._call(count, 1, batch.lengths[:count] + 1 + depth)
                out = self.draft(drafts[-1], out, call.positions, call)
        return torch.stack(drafts, 1), torch.stack(probs, 1)

    def _feed_policy(self, chain: Tensor, shape: DraftedShape) -> tuple[Tensor, Tensor]:
        """Append tokens [rows, n] to the cache; returns hidden states [rows, n, hidden] and logits [rows * n, vocab]."""
        count, n = chain.shape
        call = self._call(count, n, self.batch.lengths[:count])
        hidden = self.runner.run(chain.flatten(), call.positions, call)
        for name in shape.names & call.ctx.extras.keys():
            recorded = call.ctx.extras[name]
            call.write(field_slab(self.cache.own, name, recorded), recorded.unsqueeze(1))
        return hidden.view(count, n, -1), self.runner.head(hidden)

    def _advance(self, count: int, hidden: Tensor, new: Tensor, kept: Tensor) -> None:
        """Store the inputs of the next step."""
        batch, n, fresh = self.batch, new.shape[1], self.fresh[:count]
        batch.tokens[:count] = new.gather(1, kept[:, None]).squeeze(1)
        batch.lengths[:count] += kept + 1
        if n > 1:
            self.hidden[:count, :n], self.unread[:count, :n] = hidden, new
            fresh.copy_(kept + 1)
            return
        # a step without drafts: one more token that the draft has not processed, in place of the oldest where there is no room
        full = fresh == self.width
        for buffer, latest in ((self.hidden[:count], hidden[:, 0]), (self.unread[:count], new[:, 0])):
            mask = full.view(-1, *[1] * (buffer.dim() - 1))
            buffer.copy_(torch.where(mask, buffer.roll(-1, 1), buffer))
            buffer[batch.index[:count], fresh.clamp(max=self.width - 1)] = latest
        fresh.copy_((fresh + 1).clamp(max=self.width))

    def _call(self, count: int, queries: int, lengths: Tensor) -> StaticCall:
        return StaticCall(self.runner.context(count * queries), self.cache, self.batch, count, queries, lengths)

    def _arange(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device)
