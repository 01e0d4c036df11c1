"""Prompts that the model has just computed, for layers that extend their computation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from miles_embedded.engine.attention import PromptCall


@dataclass(frozen=True)
class Prompts:
    """Computed prompts, packed one after the other.

    Attributes:
        call: the call of the prompts; additional layers that attend through it store their keys and values with the prompts'.
        tokens: [n] ids.
        positions: [n] index of each token in its prompt.
        hidden: [n, hidden] after the last norm.
    """

    call: PromptCall
    tokens: Tensor
    positions: Tensor
    hidden: Tensor
