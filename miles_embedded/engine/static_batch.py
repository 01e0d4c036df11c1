"""The rows of a decode step in buffers whose addresses never change, as a CUDA graph wants them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles_embedded.engine.cache import to_device
from miles_embedded.engine.sampling import Params

_INTEGERS = ("tokens", "lengths", "prompt_slots", "prompt_lengths", "keys", "greedy")


class StaticBatch:
    """Row i is the one in slot i of the cache. A step reads these buffers, and writes what the next step of the same rows reads:
    a second step needs nothing from the host.

    Args:
        size: the most rows.
        device: of the model.

    Attributes:
        tokens: [size] int64, the last token of each row, which is fed.
        lengths: [size] int64, own tokens in the cache in front of it.
        prompt_slots, prompt_lengths: [size] int64, where each row's prompt is, and how long.
        keys: [size] int64 of the requests, for sampling.
        greedy: [size] int64, 1 for rows that take the most likely token.
        temperature: [size, 1] float32; 1 for greedy rows.
        index: [size] int64, 0, 1, 2 ...
        results: [2, size] float64, the tokens that a step drew and their log-probabilities.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_slots: Tensor
    prompt_lengths: Tensor
    keys: Tensor
    greedy: Tensor

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._integers = torch.zeros(len(_INTEGERS), size, dtype=torch.int64, device=device)
        for name, buffer in zip(_INTEGERS, self._integers, strict=True):
            setattr(self, name, buffer)
        self.temperature = torch.ones(size, 1, device=device)
        self.index = torch.arange(size, device=device)
        self.results = torch.zeros(2, size, dtype=torch.float64, device=device)

    def fill(
        self,
        tokens: Sequence[int],
        lengths: np.ndarray,
        prompt_slots: np.ndarray,
        prompt_lengths: np.ndarray,
        keys: Sequence[int],
        temperatures: Sequence[float],
    ) -> None:
        """Write what a step of some rows reads; a temperature of 0 is greedy. Rows behind them are padding: token 0 without a
        prompt, in a slot of its own."""
        count = len(tokens)
        integers = np.zeros((len(_INTEGERS), self.size), np.int64)
        greedy = [temperature == 0 for temperature in temperatures]
        integers[:, :count] = (tokens, lengths, prompt_slots, prompt_lengths, keys, greedy)
        temperature = np.ones((self.size, 1), np.float32)
        temperature[:count, 0] = [temperature or 1.0 for temperature in temperatures]
        self._integers.copy_(torch.from_numpy(integers))
        self.temperature.copy_(torch.from_numpy(temperature))

    def move(self, where: np.ndarray, whence: np.ndarray, count: int) -> None:
        """Rows moved from slots ``whence`` to ``where``, and ``count`` are left."""
        if len(where):
            to, source = (to_device(slots, self.index.device) for slots in (where, whence))
            self._integers.index_copy_(1, to, self._integers.index_select(1, source))
            self.temperature.index_copy_(0, to, self.temperature.index_select(0, source))
        self._integers[:, count:] = 0
        self.temperature[count:] = 1

    def params(self, count: int, mixed: bool) -> Params:
        """How the first ``count`` rows are sampled; ``mixed``: some of them may be greedy."""
        greedy = self.greedy[:count, None].bool() if mixed else False
        return Params(self.temperature[:count], greedy=greedy)
