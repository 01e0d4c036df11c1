"""Recomputation of activations in the backward pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from miles_embedded.model.parts import decoder_layers


def recompute_layers(model: nn.Module) -> None:
    """Make every decoder layer keep its input only, and recompute its activations in the backward pass."""
    named: Any = model
    enable = getattr(named, "activation_checkpointing_enable", None) or named.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # Transformers recomputes layers only in training mode. Only the layers themselves are set to it: their children, including
    # dropout, stay in evaluation mode, because a policy's log-probs must not be random.
    for layer in decoder_layers(model):
        layer.training = True
