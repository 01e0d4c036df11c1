"""The decoder: drafts a chain of tokens for every row, verifies all chains in one forward pass, and keeps the accepted prefix.

The draft's KV cache lags behind: it lacks the last tokens of a row, for which the policy has computed hidden states since the last draft.
The first draft forward of a step processes these tokens with the true hidden states; this replaces entries that were computed from the
draft's own predictions and overwrites rejected tokens. After steps without drafts it processes only the last ``UNREAD`` tokens. The draft
never sees older tokens, nor prompts that arrived while drafting was off. This lowers the acceptance rate, but not the distribution.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_embedded import Decoder, Emitted, Prompts, Row, Sampled, StepEngine, pick
from miles_speculative.draft import Draft
from miles_speculative.ledger import Ledger
from miles_speculative.lookahead import Lookahead
from miles_speculative.verify import DRAFT, DRAW, KEEP, verify

#: Number of steps without drafts whose hidden states are kept, in case drafting resumes; older ones are discarded.
UNREAD = 16


class SpeculativeDecoder(Decoder):
    """Decoder with chain drafts.

    Args:
        draft: draft of the engine's model.
        lookahead: chooses the number of draft tokens.
        profile: measure drafting and verifying separately.
    """

    def __init__(self, draft: Draft, lookahead: Lookahead, profile: bool = False) -> None:
        self.draft, self.lookahead, self.profile = draft, lookahead, profile
        self.ledger = Ledger(lookahead.most, profile)
        #: row -> hidden states [m, hidden] in pieces, for its last m tokens, which the draft has not processed yet
        self._fresh: dict[Row, list[Tensor]] = {}
        #: for each step without drafts: the rows' lists in ``_fresh``, and the hidden states [rows, hidden] to append to them
        self._passed: deque[tuple[list[list[Tensor]], Tensor]] = deque()
        #: rows whose prompt the draft has not processed
        self._blind: set[Row] = set()
        #: static rounds, which replace ``_drafted`` and ``_plain`` where they are possible; see ``async_rounds.use_rounds``
        self.rounds: Any = None
        # on a CPU, thread time excludes other load on the same processor
        self._clock = time.perf_counter if torch.cuda.is_available() else time.thread_time

    def prompts(self, engine: StepEngine, prompts: Prompts) -> None:
        if self.lookahead.idle:
            return
        before = torch.cat([torch.zeros_like(prompts.hidden[:1]), prompts.hidden[:-1]])
        before[prompts.positions == 0] = 0
        self.draft(prompts.tokens, before, prompts.positions, prompts.call)

    def join(self, engine: StepEngine, rows: Sequence[Row], hidden: Sequence[Tensor]) -> None:
        for row, state in zip(rows, hidden, strict=True):
            self._fresh[row] = [state.unsqueeze(0)]
            self.ledger.begin(row)
        if self.lookahead.idle:
            self._blind.update(rows)

    def leave(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._fresh.pop(row, None)
            self.ledger.end(row)
        self._blind.difference_update(rows)

    def step(self, engine: StepEngine, rows: list[Row]) -> Emitted | Sampled:
        if self.rounds is not None:
            emitted = self.rounds.step(rows)
            if emitted is not None:
                return emitted
            self._fresh.update({row: [hidden] for row, hidden in self.rounds.release(rows).items()})
        k = self.lookahead.choose(len(rows))
        if k:
            k = min(k, max(map(room_of, rows)))
        return self._drafted(engine, rows, k) if k > 0 else self._plain(engine, rows)

    def count_fresh(self, row: Row) -> int:
        """Return the number of the last tokens of a row that the draft has not processed, as far as their hidden states are kept."""
        self._append_passed()
        return sum(map(len, self._fresh[row]))

    def take_fresh(self, row: Row) -> Tensor:
        """Return the hidden states [n, hidden] that are kept for the last n tokens of a row, and keep them no longer."""
        self._append_passed()
        pieces, self._fresh[row] = self._fresh[row], []
        return torch.cat(pieces)

    def count_round(
        self, rows: Sequence[Row], k: int, kept: Sequence[int], seconds: float, steady: bool, **parts: float
    ) -> None:
        """Count a step with k drafts, or one without. Call it before the rows' tokens are extended.

        Args:
            rows: the rows of the step.
            k: number of drafts.
            kept: number of accepted drafts of each row.
            seconds: duration of the step.
            steady: whether the duration is representative.
            parts: seconds of parts of the step, by name.
        """
        if not k:
            self.lookahead.record(len(rows), 0, seconds)
            self.ledger.plain(len(rows), seconds)
            return
        drafted = [max(min(k, room_of(row)), 0) for row in rows]
        tried, held = self.ledger.count(rows, k, drafted, kept, self._blind)
        self.lookahead.record(len(rows), k, seconds, steady, tried, held)
        self.ledger.spend(rows, seconds, self.lookahead.plain_seconds(len(rows)), kept, **parts)

    def _drafted(self, engine: StepEngine, rows: list[Row], k: int) -> Emitted:
        """Run a step with k drafts."""
        # after steps without drafts, the draft has more tokens to process than usual
        steady = not self._passed and max(len(piece) for row in rows for piece in self._fresh[row]) <= k + 1
        start = self.now()
        drafts = self._draft(engine, rows, k)
        middle = self.now()
        emitted = self._verify(engine, rows, drafts)
        end = self.now()
        kept = [len(tokens) - 1 for tokens in emitted.tokens]
        parts = {"draft": middle - start, "verify": end - middle} if self.profile else {}
        self.count_round(rows, k, kept, end - start, steady, **parts)
        return emitted

    def now(self) -> float:
        """Return the time in seconds; with ``profile``, after the GPU has finished."""
        if self.profile and torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._clock()

    def _plain(self, engine: StepEngine, rows: list[Row]) -> Sampled:
        """Run a step without drafts. Performance-critical: overhead beyond the policy's forward pass adds to every plain step."""
        start = self.now()
        fed = engine.forward(rows, [row.tokens[-1:] for row in rows])
        sampled = engine.sample(fed.logits, rows)
        self._passed.append(([self._fresh[row] for row in rows], fed.hidden))
        if len(self._passed) > UNREAD:
            for pieces in self._passed.popleft()[0]:
                pieces.clear()
        self.count_round(rows, 0, [], self.now() - start, True)
        return sampled

    def _append_passed(self) -> None:
        """Append the hidden states of steps without drafts to those of their rows."""
        for entries, hidden in self._passed:
            for pieces, state in zip(entries, hidden.split(1), strict=True):
                pieces.append(state)
        self._passed.clear()

    def _read(self, engine: StepEngine, rows: list[Row]) -> Tensor:
        """Let the draft process each row's pending tokens; returns [rows, hidden], its output for the last token."""
        self._append_passed()
        fresh = torch.cat([piece for row in rows for piece in self._fresh[row]])
        counts = [sum(map(len, self._fresh[row])) for row in rows]
        lengths, device = lengths_of(rows), fresh.device
        call = engine.call(rows, counts, lengths - counts)
        tokens = torch.tensor([t for row, n in zip(rows, counts, strict=True) for t in row.tokens[-n:]], device=device)
        out = self.draft(tokens, fresh, positions_of(call, device), call)
        return out.index_select(0, torch.tensor(counts, device=device).cumsum(0) - 1)

    def _draft(self, engine: StepEngine, rows: list[Row], k: int) -> Any:
        """Draft k tokens per row; returns the tokens [rows, k] and the draft distributions [rows, k, vocab]."""
        out, lengths = self._read(engine, rows), lengths_of(rows)
        device = out.device
        at = torch.from_numpy(lengths).to(device)
        drafts, probs = [], []
        for depth in range(k):
            probs.append(engine.distribution(self.draft.logits(out), rows).log_probs.exp())
            drafts.append(pick(probs[-1], engine.uniform(rows, at + depth, DRAFT)))
            if depth + 1 < k:
                call = engine.call(rows, [1] * len(rows), lengths + depth)
                out = self.draft(drafts[-1], out, positions_of(call, device), call)
        return torch.stack(drafts, 1), torch.stack(probs, 1)

    def _verify(self, engine: StepEngine, rows: list[Row], drafted: Any) -> Emitted:
        """Verify what ``_draft`` returned, and truncate the cache to the accepted tokens."""
        drafts, q = drafted
        k, device = drafts.shape[1], drafts.device
        room = [min(k, room_of(row)) for row in rows]
        chains = [[row.tokens[-1], *d[:n]] for row, d, n in zip(rows, drafts.tolist(), room, strict=True)]
        fed = engine.forward(rows, chains)
        counts = torch.tensor([len(chain) for chain in chains], device=device)
        dist = engine.distribution(fed.logits, rows, counts)
        starts = [0, *accumulate(map(len, chains))]
        probs = dist.log_probs.exp()
        if min(room) == k:
            probs = probs.view(len(rows), k + 1, -1)
        else:
            padded = [[s + min(i, n) for i in range(k + 1)] for s, n in zip(starts, room, strict=False)]
            probs = probs[torch.tensor(padded, device=device)]
        at = torch.from_numpy(lengths_of(rows)).to(device).unsqueeze(1) + torch.arange(k + 1, device=device)
        keep, draw = engine.uniform(rows, at[:, :k], KEEP), engine.uniform(rows, at, DRAW)
        found = verify(probs, q, drafts, torch.tensor(room, device=device), keep, draw)
        kept, behind = (x.tolist() for x in found)
        new = [[*chain[1 : n + 1], token] for chain, n, token in zip(chains, kept, behind, strict=True)]
        # rejected tokens are truncated below; their log-probs are ignored
        flat = [t for c, tokens in zip(chains, new, strict=True) for t in (tokens + c)[: len(c)]]
        sampled = engine.record(dist, rows, torch.tensor(flat, device=device), counts)
        engine.truncate(rows, [len(row.tokens) + n for row, n in zip(rows, kept, strict=True)])
        spans = [slice(s, s + n + 1) for s, n in zip(starts, kept, strict=False)]
        for row, span in zip(rows, spans, strict=True):
            self._fresh[row] = [fed.hidden[span]]
        return Emitted(
            new,
            [sampled.log_probs[span] for span in spans],
            None if sampled.supports is None else [sampled.supports[span] for span in spans],
            None if sampled.capped is None else [sampled.capped[span] for span in spans],
        )


def room_of(row: Row) -> int:
    """Return the maximum number of useful drafts for a row; the step emits one more token."""
    return int(row.limit - len(row.tokens) - 1)


def lengths_of(rows: Sequence[Row]) -> Any:
    """Return [rows]: the number of tokens of each row."""
    return np.array([len(row.tokens) for row in rows])


def positions_of(call: Any, device: torch.device) -> Tensor:
    """Return [tokens]: the positions of the tokens in an engine call."""
    return torch.from_numpy(call.rows.positions).to(device)
