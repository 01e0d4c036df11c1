"""Prompts at the moment when the model has computed them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from miles_embedded.engine.attention import PromptCall


@dataclass(frozen=True)
class Prompts:
    """Prompts that were just computed, packed one after the other.

    Attributes:
        call: layers beside the model's that attend through it keep their keys and values with the prompt's.
        tokens: [n] ids.
        positions: [n] of each token in its prompt.
        hidden: [n, hidden] after the last norm.
    """

    call: PromptCall
    tokens: Tensor
    positions: Tensor
    hidden: Tensor
