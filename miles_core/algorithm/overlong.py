"""The soft over-length penalty of DAPO (arXiv 2503.14476, eq. 13)."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.errors import ConfigError


def overlong_penalty(response_lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Return the penalty to add to each reward, float64 [samples], in [-factor, 0].

    The penalty is 0 up to ``max_length - buffer`` tokens, decreases linearly to -factor at ``max_length``, and is -factor beyond.

    Args:
        response_lengths: [samples], in tokens.
        max_length: length in tokens at which the full penalty is reached.
        buffer: length in tokens of the linear part; DAPO used 4,096 of 20,480.
        factor: magnitude of the full penalty.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(
            f"the over-length buffer must be between 1 and the longest response {max_length}, got {buffer}"
        )
    beyond = response_lengths.double() - (max_length - buffer)
    return -factor * torch.clamp(beyond / buffer, 0.0, 1.0)
