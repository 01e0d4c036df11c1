"""The rows of a decode step in buffers with fixed addresses, as a CUDA graph requires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from miles_embedded.engine.sampling import Params
from miles_embedded.engine.store import to_device


class StaticBatch:
    """Inputs and results of a decode step. Row i is the row in slot i of the cache.

    A step reads these buffers and writes the inputs of the next step of the same rows, which therefore needs no data from the host.

    Args:
        size: largest number of rows.
        device: device of the model.

    Attributes:
        tokens: [size] int64, last token of each row, to be fed.
        lengths: [size] int64, own tokens in the cache in front of it.
        prompt_slots, prompt_lengths: [size] int64, slot and length of each row's prompt.
        keys: [size] int64, request keys for sampling.
        greedy: [size] int64, 1 for rows that choose the most likely token.
        variants: [size] int64, variant of the model of each row.
        temperature: [size, 1] float32; 1 for greedy rows.
        index: [size] int64, 0, 1, 2 ...
        results: [2, size] float64, tokens sampled by a step and their log-probabilities.
    """

    #: Integers of a row, one buffer each.
    INTEGERS: ClassVar[tuple[str, ...]] = (
        *("tokens", "lengths", "prompt_slots", "prompt_lengths", "keys", "greedy", "variants"),
    )

    tokens: Tensor
    lengths: Tensor
    prompt_slots: Tensor
    prompt_lengths: Tensor
    keys: Tensor
    greedy: Tensor
    variants: Tensor

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._integers = torch.zeros(len(self.INTEGERS), size, dtype=torch.int64, device=device)
        for name, buffer in zip(self.INTEGERS, self._integers, strict=True):
            setattr(self, name, buffer)
        self.temperature = torch.ones(size, 1, device=device)
        self.index = torch.arange(size, device=device)
        self.results = torch.zeros(2, size, dtype=torch.float64, device=device)

    def fill(
        self,
        tokens: Sequence[int] | np.ndarray,
        lengths: np.ndarray,
        prompt_slots: np.ndarray,
        prompt_lengths: np.ndarray,
        keys: Sequence[int] | np.ndarray,
        temperatures: Sequence[float] | np.ndarray,
        variants: Sequence[int] | np.ndarray,
        *more: Sequence[int],
    ) -> None:
        """Write the inputs of a step; temperature 0 means greedy, and ``more`` are the integers that a subclass adds. The remaining rows are
        padding: token 0 without a prompt, with one slot per row."""
        count = len(tokens)
        integers = np.zeros((len(self.INTEGERS), self.size), np.int64)
        greedy = np.equal(temperatures, 0)
        integers[:, :count] = np.array([tokens, lengths, prompt_slots, prompt_lengths, keys, greedy, variants, *more])
        temperature = np.ones((self.size, 1), np.float32)
        temperature[:count, 0] = np.where(greedy, 1.0, temperatures)
        self._integers.copy_(torch.from_numpy(integers))
        self.temperature.copy_(torch.from_numpy(temperature))

    def move(self, where: np.ndarray, sources: np.ndarray, count: int) -> None:
        """Move rows from slots ``sources`` to ``where``; ``count`` rows remain, and the others become padding."""
        if len(where):
            to, source = (to_device(slots, self.index.device) for slots in (where, sources))
            self._integers.index_copy_(1, to, self._integers.index_select(1, source))
            self.temperature.index_copy_(0, to, self.temperature.index_select(0, source))
        self._integers[:, count:] = 0
        self.temperature[count:] = 1

    def params(self, count: int, mixed: bool, queries: int = 1) -> Params:
        """Return the sampling parameters of the first ``count`` rows, each repeated ``queries`` times; ``mixed``: some rows may be greedy."""
        greedy, temperature = self.greedy[:count, None], self.temperature[:count]
        if queries > 1:
            greedy, temperature = (x.expand(-1, queries).reshape(-1, 1) for x in (greedy, temperature))
        return Params(temperature, greedy=greedy.bool() if mixed else False)
