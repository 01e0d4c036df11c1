"""Kinds of the decoder layers of a model, from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Names in older configurations -> Transformers' present names.
_RENAMED = {"mamba": "linear_attention", "attention": "full_attention"}
#: Letters of Nemotron-H's ``hybrid_override_pattern``.
_LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
#: Model types whose layers all keep a state and do not attend, and those whose layers all do both.
_STATES_ONLY, _BOTH = ("falcon_mamba", "mamba", "mamba2"), ("falcon_h1",)


def layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each decoder layer, in the names of Transformers' ``layer_types``.

    Supports the entries of different model families. ``moe`` and ``mlp`` are layers without attention and without a state.

    Args:
        config: content of ``config.json``; of a multimodal model its ``text_config`` is used.

    Returns:
        One name per layer; empty if the configuration states none, as most models that only attend.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    for key in ("layer_types", "layers_block_type"):
        listed = config.get(key)
        if isinstance(listed, list):
            return tuple(_RENAMED.get(str(kind), str(kind)) for kind in listed)
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        return tuple(_LETTERS.get(letter, letter) for letter in pattern)
    layers = config.get("num_hidden_layers")
    if type(layers) is not int:
        return ()
    kind = config.get("model_type")
    if kind in _STATES_ONLY or kind in _BOTH:
        return ("hybrid" if kind in _BOTH else "linear_attention",) * layers
    attending = _attending(config, layers)
    if attending is None:
        return ()
    state = "conv" if "conv_L_cache" in config else "linear_attention"
    return tuple("full_attention" if i in attending else state for i in range(layers))


def _attending(config: Mapping[str, Any], layers: int) -> set[int] | None:
    """Return the indices of the layers that attend, where the other layers keep a state; None if the configuration does not say so."""
    for key in ("attn_layer_indices", "full_attn_idxs"):  # Bamba, LFM2
        if isinstance(config.get(key), list):
            return set(config[key])
    linear = config.get("linear_attn_config")  # Kimi-Linear, counted from 1
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        return {number - 1 for number in linear["full_attn_layers"]}
    if period := config.get("attn_layer_period"):  # Jamba
        return {i for i in range(layers) if i % period == config.get("attn_layer_offset", 0)}
    for key in ("full_attention_interval", "layer_group_size"):  # Qwen3-Next and Qwen3.5, Ling 2.5
        if interval := config.get(key):
            return {i for i in range(layers) if (i + 1) % interval == 0}
    return None
