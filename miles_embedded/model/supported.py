"""Checks whether the embedded backend can compute the layers of a model, with or without weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from miles_core.errors import CheckpointError
from miles_embedded.manifest import LAYER_TYPES, STATE_TYPES
from miles_embedded.model.indexer import KNOWN
from miles_embedded.model.parts import decoder_layers, text_configuration
from miles_embedded.model.states import stateful_modules


def refuse_config(model: nn.Module) -> None:
    """Check a model, with or without weights.

    Raises:
        CheckpointError: it has unsupported layers, or rotary frequencies that are not finite.
    """
    _refuse_unknown_attention(model)
    _refuse_unknown_states(model)
    for name, module in model.named_modules():
        if getattr(module, "inv_freq", None) is not None and hasattr(module, "config"):
            made: Any = type(module)(module.config)  # the model itself may be on the meta device, without values
            if not made.inv_freq.isfinite().all():
                rope = getattr(module.config, "rope_parameters", None)
                raise CheckpointError(
                    f"the rotary frequencies of {name} are not finite numbers (rope_parameters in config.json: {rope})"
                )


def _refuse_unknown_attention(model: nn.Module) -> None:
    """CheckpointError for layers whose restricted attention is not supported and would be computed as full attention."""
    indexer = next(
        (n for n, m in model.named_modules() if type(m).__name__.endswith("Indexer") and type(m).__name__ not in KNOWN),
        None,
    )
    if indexer is not None:
        raise CheckpointError(
            f"{type(model).__name__} chooses the keys of its sparse attention ({indexer}) in a way that the embedded backend "
            "does not support; use another engine and trainer"
        )
    config = text_configuration(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if kinds:
        raise CheckpointError(
            f"{type(model).__name__} has layers of type {', '.join(sorted(kinds))} (layer_types in config.json), which the "
            "embedded backend does not compute; use another engine and trainer"
        )


def _refuse_unknown_states(model: nn.Module) -> None:
    """CheckpointError for layers that should keep a state, but not through the methods of Transformers' cache (``states``)."""
    kinds = getattr(text_configuration(model), "layer_types", None) or ()
    for number, (layer, kind) in enumerate(zip(decoder_layers(model), kinds, strict=False)):
        if kind in STATE_TYPES and next(stateful_modules(layer), None) is None:
            raise CheckpointError(
                f"layer {number} of {type(model).__name__} is of type {kind}, but its code keeps its state in a way that the embedded backend "
                "does not support; use another engine and trainer"
            )
