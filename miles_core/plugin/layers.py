"""Kinds of the decoder layers of a model, and those with experts, from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.plugin.model_config import EXPERTS

#: Names of the number of layers.
LAYERS = ("decoder_layers", "num_hidden_layers", "n_layer", "num_layers")

#: Kinds of layers that keep a state between tokens.
STATE_KINDS = frozenset({"linear_attention", "conv", "hybrid"})
#: Kinds of layers without attention and without a state.
NO_MIXER = frozenset({"moe", "mlp"})
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


def moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the decoder layers with experts, from the language model's entries of a ``config.json``.

    Supports the keys of different model families. Empty for a model without experts.
    """
    if not any(config.get(key) for key in EXPERTS):
        return ()
    for key, sparse in (("mlp_layer_types", "sparse"), ("moe_layer_freq", 1)):
        listed = config.get(key)
        if isinstance(listed, list):
            return tuple(i for i, entry in enumerate(listed) if entry == sparse)
    if isinstance(config.get("moe_layers"), list):
        return tuple(config["moe_layers"])
    if "moe" in (kinds := layer_kinds(config)) or "mlp" in kinds:
        return tuple(i for i, kind in enumerate(kinds) if kind == "moe")
    layers = next((int(config[key]) for key in LAYERS if config.get(key) is not None), 0)
    if period := config.get("expert_layer_period"):
        return tuple(i for i in range(layers) if i % period == config.get("expert_layer_offset", 0))
    first = int(config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0)
    every = int(config.get("moe_layer_freq") or 1)
    step = int(config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    return tuple(i for i in range(layers) if i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense)
