"""One round over static buffers: drafts a chain of tokens for every row, verifies all chains, and stores what the next round reads.

The round reads no number from the host, so a CUDA graph can replay it. Every row drafts and verifies the same number of tokens. Drafts beyond
the end of a row are never accepted, and the next round overwrites the cache's entries of rejected tokens. Random numbers depend on the
position of a token only, so a row emits what ``SpeculativeDecoder`` emits without static buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_embedded import StaticCall, distribution, operations_of, pick, stream_start, uniform_from
from miles_speculative.round_batch import RoundBatch
from miles_speculative.verify import DRAFT, DRAW, KEEP, verify


@dataclass(frozen=True)
class RoundShape:
    """Properties that require a separate recording of a round.

    Attributes:
        rows: rows of the batch, padding included.
        drafts: drafted tokens per row; 0 for a step without drafts.
        read: tokens per row that the draft processes first, at least the number of tokens that wait for it.
        mixed: whether some rows may be greedy.
        names: recorded fields to keep if modules record them.
    """

    rows: int
    drafts: int
    read: int
    mixed: bool = False
    names: frozenset[str] = frozenset()

    @property
    def appended(self) -> int:
        """See ``AsyncScheduling``."""
        return self.drafts + 1

    @property
    def reach(self) -> int:
        """See ``AsyncScheduling``."""
        return max(self.drafts + 1, self.read)


class StaticRound:
    """A round of ``runner``'s model over ``batch``.

    Args:
        runner: the policy with its cache.
        batch: the rows.
        draft: returns the draft.
        seed: the run's seed.
        longest: largest sequence length; later positions, of tokens that are never accepted, are clamped.
    """

    def __init__(self, runner: Any, batch: RoundBatch, draft: Any, seed: int, longest: int) -> None:
        self.runner, self.batch, self.draft, self.seed, self.longest = runner, batch, draft, seed, longest

    @torch.no_grad()
    def __call__(self, shape: RoundShape) -> Tensor:
        """Run a round; returns the policy's logits [rows * (drafts + 1), vocab]. Writes ``batch.results`` and advances the batch."""
        count, batch = shape.rows, self.batch
        # read before the batch advances
        length = batch.lengths[:count].clone()
        uniforms = self._uniforms(shape, length)
        chain = [batch.tokens[:count]]
        probs: list[Tensor] = []
        if shape.drafts:
            self._draft(shape, length, uniforms[DRAFT], chain, probs)
        fed = torch.stack(chain, 1)
        batch.chain[:count, : shape.drafts + 1] = fed
        call, hidden = self._feed(fed, length)
        call.keep_recorded(shape.names)
        logits: Tensor = self.runner.head(hidden)
        kept, tokens, log_probs = self._accept(shape, logits, fed, probs, uniforms)
        self._write_results(shape, kept, tokens, log_probs)
        self._advance(shape, length, kept, tokens, hidden)
        return logits

    def _uniforms(self, shape: RoundShape, length: Tensor) -> dict[int, Tensor]:
        """Return the random numbers of every stream, [rows, drafts + 1] for the tokens after the last one; computed together, because each of
        the operations takes as long for one number as for all."""
        batch, count, device = self.batch, shape.rows, length.device
        depth = torch.arange(shape.drafts + 1, device=device)
        at = (batch.prompt_lengths[:count] + length + 1)[:, None] + depth
        streams = (DRAW, KEEP, DRAFT)
        starts = [torch.full_like(at, stream_start(self.seed, stream)) for stream in streams]
        found = uniform_from(torch.stack(starts), batch.keys[:count, None], at)
        return dict(zip(streams, found, strict=True))

    def _draft(
        self, shape: RoundShape, length: Tensor, draws: Tensor, chain: list[Tensor], probs: list[Tensor]
    ) -> None:
        """Draft tokens with the random numbers ``draws``. Appends the tokens [rows] to ``chain`` and the distributions [rows, vocab] that they
        were drawn from to ``probs``."""
        batch, count, draft = self.batch, shape.rows, self.draft()
        params, normalize = batch.params(count, shape.mixed), operations_of(self.runner.model).log_softmax
        out = self._read(shape, length, draft)
        for depth in range(shape.drafts):
            probs.append(distribution(draft.logits(out), params, normalize).log_probs.exp())
            drawn = pick(probs[-1], draws[:, depth])
            chain.append(self._valid(drawn))
            if depth + 1 < shape.drafts:
                call = self._call(count, 1, length + 1 + depth)
                out = draft(chain[-1], out, self._positions(call), call)

    def _read(self, shape: RoundShape, length: Tensor, draft: Any) -> Tensor:
        """Let the draft process the tokens that wait for it; returns [rows, hidden], its output for the last token of each row.

        Rows with fewer than ``shape.read`` tokens are padded at the end. Their tokens do not attend to the padding, whose entries in the
        cache are overwritten by those of the drafts."""
        batch, count = self.batch, shape.rows
        assert batch.hidden is not None
        unread, hidden = batch.unread[:count], batch.hidden[:count]
        first = length + 1 - unread
        places = (first[:, None] + torch.arange(shape.read, device=first.device)) % batch.kept
        states = hidden.gather(1, _as_index(places, hidden))
        call = self._call(count, shape.read, first)
        tokens = batch.following[:count].gather(1, places)
        out = draft(tokens.flatten(), states.flatten(0, 1), self._positions(call), call).view(count, shape.read, -1)
        last = (unread - 1).clamp(min=0)[:, None]  # padding rows have none
        return out.gather(1, _as_index(last, out)).squeeze(1)

    def _feed(self, chain: Tensor, length: Tensor) -> tuple[StaticCall, Tensor]:
        """Feed the chains to the policy; returns the call and the hidden states [rows * (drafts + 1), hidden]."""
        count, queries = chain.shape
        call = self._call(count, queries, length)
        return call, self.runner.run(chain.flatten(), self._positions(call), call)

    def _call(self, count: int, queries: int, length: Tensor) -> StaticCall:
        runner = self.runner
        return StaticCall(runner.context(count * queries), runner.cache, self.batch, count, queries, length)

    def _positions(self, call: StaticCall) -> Tensor:
        return call.positions.clamp(max=self.longest - 1)

    def _accept(
        self, shape: RoundShape, logits: Tensor, chain: Tensor, probs: list[Tensor], uniforms: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Accept drafts and draw the token after them; returns the numbers of accepted drafts [rows], the emitted tokens [rows, drafts + 1],
        which repeat the last token, and their log-probabilities."""
        batch, count, k = self.batch, shape.rows, shape.drafts
        normalize = operations_of(self.runner.model).log_softmax
        dist = distribution(logits, batch.params(count, shape.mixed, k + 1), normalize)
        p = dist.log_probs.exp().view(count, k + 1, -1)
        depth = torch.arange(k + 1, device=p.device)
        if k:
            room = batch.room[:count].clamp(0, k)
            kept, following = verify(
                p, torch.stack(probs, 1), chain[:, 1:], room, uniforms[KEEP][:, :k], uniforms[DRAW]
            )
        else:
            kept, following = torch.zeros_like(batch.lengths[:count]), pick(p[:, 0], uniforms[DRAW][:, 0])
        drafted = torch.cat([chain[:, 1:], following[:, None]], 1)
        tokens = torch.where(depth < kept[:, None], drafted, following[:, None])
        index = self._valid(tokens).unsqueeze(-1)
        return kept, tokens, dist.full.view(count, k + 1, -1).gather(-1, index).squeeze(-1)

    def _write_results(self, shape: RoundShape, kept: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        results, count, emitted = self.batch.results, shape.rows, shape.drafts + 1
        results[:emitted, :count] = tokens.t().double()
        results[emitted : 2 * emitted, :count] = log_probs.t().double()
        results[-1, :count] = (kept + 1).double()

    def _advance(self, shape: RoundShape, length: Tensor, kept: Tensor, tokens: Tensor, hidden: Tensor) -> None:
        """Write what the next round reads: the emitted tokens, which wait for the draft, and the numbers of the rows."""
        batch, count, k = self.batch, shape.rows, shape.drafts
        assert batch.hidden is not None
        emitted = self._valid(tokens)
        places = (length[:, None] + 1 + torch.arange(k + 1, device=length.device)) % batch.kept
        batch.following[:count].scatter_(1, places, emitted)
        states = hidden.view(count, k + 1, -1)
        batch.hidden[:count].scatter_(1, _as_index(places, states), states)
        batch.tokens[:count] = emitted[:, -1]
        batch.lengths[:count].add_(kept + 1)
        batch.room[:count].sub_(kept + 1)
        unread = batch.unread[:count]
        unread.copy_(kept + 1 if k else (unread + 1).clamp(max=batch.waiting))

    def _valid(self, tokens: Tensor) -> Tensor:
        """Clamp tokens to the vocabulary; logits that are not finite lead to a token beyond it."""
        return tokens.clamp(max=self.runner.vocabulary - 1)


def _as_index(places: Tensor, like: Tensor) -> Tensor:
    """[rows, n] -> [rows, n, hidden], an index of ``like`` [rows, ..., hidden] for ``gather`` and ``scatter_``."""
    return places.unsqueeze(-1).expand(-1, -1, like.shape[-1])
