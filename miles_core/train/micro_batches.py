"""What a trainer's micro-batch holds: samples, or as many of them as fit into a number of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.config import Config

#: Tokens of a micro-batch where the user says nothing, by device: enough for a GPU to be busy, and for a CPU's memory to do.
MICRO_BATCH_TOKENS = {"cuda": 8192, "cpu": 1024}


def micro_batch_limits(config: Config, device: str) -> tuple[int | None, int | None]:
    """(samples, tokens) that a micro-batch may have at most, of which one is None. Filling by tokens is the default, because
    a number of samples is too few for short responses and too many for long ones.

    Args:
        device: where the trainer computes, ``cuda`` or ``cpu``.
    """
    train = config.train
    if train.micro_batch_size and not train.use_dynamic_batch_size:
        return train.micro_batch_size, None
    return None, train.max_tokens_per_gpu or MICRO_BATCH_TOKENS[device]
