"""Models that the embedded backend would compute wrongly, found in the modules and the configuration of a model that is built.

The manifest refuses others by the entries of ``config.json`` alone.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from miles_core.errors import CheckpointError
from miles_core.plugin.layers import STATE_KINDS
from miles_embedded.manifest import LAYER_TYPES
from miles_embedded.model.indexer import KNOWN
from miles_embedded.model.learned_positions import table_length
from miles_embedded.model.parts import decoder_layers, text_configuration
from miles_embedded.model.states import stateful_modules


def refuse_config(model: nn.Module) -> None:
    """Check a model, with or without weights.

    Raises:
        CheckpointError: it has unsupported layers, or rotary frequencies that are not finite.
    """
    _refuse_encoder(model)
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


def refuse_longer(model: nn.Module, longest: int, origin: str) -> None:
    """CheckpointError if the model's table of positions has fewer rows than ``longest``, which ``origin`` allows."""
    rows = table_length(model)
    if rows is not None and longest > rows:
        raise CheckpointError(
            f"{type(model).__name__} has learned positions for {rows} tokens, and {origin} allows sequences of {longest}; use "
            f"--rollout-max-context-len {rows}"
        )


def _refuse_encoder(model: nn.Module) -> None:
    """CheckpointError for BERT's kind of model whose tokens attend to each other in both directions."""
    config = text_configuration(model)
    if hasattr(config, "add_cross_attention") and getattr(config, "is_decoder", None) is False:
        raise CheckpointError(
            f"{type(model).__name__} attends in both directions, because is_decoder in its config.json is false or missing; set it to true "
            "if the checkpoint was trained to generate text, or choose another checkpoint"
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
        if kind in STATE_KINDS and next(stateful_modules(layer), None) is None:
            raise CheckpointError(
                f"layer {number} of {type(model).__name__} is of type {kind}, but its code keeps its state in a way that the embedded backend "
                "does not support; use another engine and trainer"
            )
