"""Limits of a trainer's micro-batches, in samples or in tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.config import Config

#: Default token limit of a micro-batch by device: enough to keep a GPU busy, and small enough for a CPU's memory.
MICRO_BATCH_TOKENS = {"cuda": 8192, "cpu": 1024}


def micro_batch_limits(config: Config, device: str) -> tuple[int | None, int | None]:
    """Return the limits of a micro-batch, ``(samples, tokens)``; exactly one of them is None.

    The default is a token limit, because a fixed number of samples is too small for short responses and too large for long ones.

    Args:
        config: the run's configuration.
        device: the trainer's device, ``cuda`` or ``cpu``.
    """
    train = config.train
    if train.micro_batch_size and not train.use_dynamic_batch_size:
        return train.micro_batch_size, None
    return None, train.max_tokens_per_gpu or MICRO_BATCH_TOKENS[device]
