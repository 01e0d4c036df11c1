"""What a trainer's micro-batch holds: samples, or as many of them as fit into a number of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.config import Config

#: Tokens of a micro-batch where the user says nothing: enough for a GPU to be busy, and for a CPU's memory to do.
TOKENS_ON_GPU, TOKENS_ON_CPU = 8192, 2048


def micro_batch_limits(config: Config, on_gpu: bool) -> tuple[int | None, int | None]:
    """(samples, tokens) that a micro-batch may have at most, of which one is None. Filling by tokens is the default, because
    a number of samples is too few for short responses and too many for long ones."""
    train = config.train
    if train.micro_batch_size and not train.use_dynamic_batch_size:
        return train.micro_batch_size, None
    return None, train.max_tokens_per_gpu or (TOKENS_ON_GPU if on_gpu else TOKENS_ON_CPU)
