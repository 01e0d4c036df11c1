"""The rows of a round (see ``static_round``) in buffers with fixed addresses, as a CUDA graph requires.

The draft processes a token together with the policy's hidden state of the previous token. Both are stored in a ring buffer: those of the
token in column c of the row's cache are at index c % ``kept``. A round overwrites only entries that neither it nor the previous round
reads, so a discarded round can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from miles_embedded import StaticBatch


class RoundBatch(StaticBatch):
    """Inputs and results of a round.

    Args:
        size: largest number of rows.
        device: device of the model.
        most: maximum number of drafts.
        waiting: maximum number of tokens per row that wait for the draft.

    Attributes:
        unread: [size] int64, last tokens of each row that wait for the draft; 0 for padding.
        room: [size] int64, maximum number of useful drafts.
        following: [size, kept] int64, the ring of tokens.
        hidden: [size, kept, hidden], the ring of hidden states; None before the first row.
        chain: [size, most + 1] int64, the tokens that the policy verified in the last round.
        results: [2 * (most + 1) + 1, size] float64: emitted tokens by depth, their log-probabilities by depth, number of emitted tokens.
    """

    INTEGERS: ClassVar[tuple[str, ...]] = (*StaticBatch.INTEGERS, "unread", "room")

    unread: Tensor
    room: Tensor

    def __init__(self, size: int, device: torch.device, most: int, waiting: int) -> None:
        super().__init__(size, device)
        self.most, self.waiting, self.kept = most, waiting, waiting + most + 1
        self.following = torch.zeros(size, self.kept, dtype=torch.int64, device=device)
        self.hidden: Tensor | None = None
        self.chain = torch.zeros(size, most + 1, dtype=torch.int64, device=device)
        self.results = torch.zeros(2 * (most + 1) + 1, size, dtype=torch.float64, device=device)

    def put(self, slot: int, end: int, tokens: Sequence[int], hidden: Tensor) -> None:
        """Store the last tokens of a row, which wait for the draft: ``tokens`` [n] in the own columns that end with ``end``, and ``hidden``
        [n, hidden] of the tokens in front of them."""
        if self.hidden is None:
            self.hidden = hidden.new_zeros(self.size, self.kept, hidden.shape[-1])
        places = torch.from_numpy(self._places(end, len(tokens))).to(hidden.device)
        self.following[slot, places] = torch.tensor(tokens, device=hidden.device)
        self.hidden[slot, places] = hidden

    def take(self, slot: int, end: int, count: int) -> Tensor:
        """Return the hidden states [count, hidden] that wait with the last ``count`` tokens of a row, see ``put``."""
        assert self.hidden is not None
        return self.hidden[slot, torch.from_numpy(self._places(end, count)).to(self.hidden.device)]

    def _places(self, end: int, count: int) -> np.ndarray:
        return np.arange(end - count + 1, end + 1) % self.kept

    def move(self, where: np.ndarray, sources: np.ndarray, count: int) -> None:
        super().move(where, sources, count)
        if len(where):
            to, source = (torch.from_numpy(slots).to(self.index.device) for slots in (where, sources))
            for ring in (self.following, self.hidden):
                if ring is not None:
                    ring.index_copy_(0, to, ring.index_select(0, source))
