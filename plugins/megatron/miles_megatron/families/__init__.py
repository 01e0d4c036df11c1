"""The families of models that Megatron-Core can train here, one file each.

A family's file has two functions: ``read(config) -> Architecture`` from a parsed ``config.json`` (importing no torch), and
``layer(architecture, m, h, sparse)``, which yields an ``Entry`` for every tensor of a layer, with experts or without, whose names begin
with ``m`` in Megatron-Core's model and with ``h`` in the checkpoint. A new family is such a file and a line in ``FAMILIES``; the parts that
families share are in ``parts``. ``tests/test_families.py`` then compares names, counts and bytes with the model of Transformers.

A checkpoint keeps an MTP layer (DeepSeek-V3, arXiv 2412.19437, section 2.2) as decoder layer number ``num_hidden_layers``: a layer like
the last, with a projection and three norms; some have copies of the embedding and the output layer in it, which are shared with
the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from miles_core.plugin import CheckpointError
from miles_megatron.architecture import Architecture
from miles_megatron.config_keys import find_foreign
from miles_megatron.families.parts import Entry, ends

#: ``model_type`` of a checkpoint -> module of this package.
FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "mixtral": "mixtral",
    "deepseek_v3": "deepseek_v3",
    "glm4_moe": "glm4_moe",
    "minimax_m2": "minimax_m2",
    "gpt_oss": "gpt_oss",
}

#: ``model_type`` -> what Megatron-Core 0.19 lacks of this family.
LACKING = {
    "gemma2": "norms behind attention and feed-forward layers, caps on scores and logits, and a scaled embedding",
    "gemma3_text": "norms behind attention and feed-forward layers, a rotary base of their own for layers with a window, and a scaled embedding",
}
LACKING |= {
    "gemma3": LACKING["gemma3_text"],
    "gemma3n": "inputs per layer, several residual streams, and keys that layers share",
    "gemma3n_text": "inputs per layer, several residual streams, and keys that layers share",
    "gemma4": "norms behind attention and feed-forward layers, and heads of two sizes",
    "gemma4_text": "norms behind attention and feed-forward layers, and heads of two sizes",
    "glm4": "norms behind attention and feed-forward layers",
    "llama4": "attention in chunks, layers without rotary embedding, and scores that weigh the experts' input",
    "llama4_text": "attention in chunks, layers without rotary embedding, and scores that weigh the experts' input",
    "deepseek_v32": "attention whose keys an indexer chooses (in the modules that are used here)",
    "glm_moe_dsa": "attention whose keys an indexer chooses (in the modules that are used here)",
}


def read(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a checkpoint.

    Args:
        config: its ``config.json``.

    Raises:
        CheckpointError: there is no table for this family, or an entry is missing.
    """
    family = str(config.get("model_type"))
    if family in LACKING:
        raise CheckpointError(
            f"config.json says model_type {family}, of which Megatron-Core lacks {LACKING[family]}; use --trainer embedded"
        )
    if family not in FAMILIES:
        raise CheckpointError(
            f"config.json says model_type {family}, for which the megatron plugin has no table of weights; it has "
            f"{', '.join(FAMILIES)}. use --trainer embedded, or write a table, which is one file: miles_megatron/families/__init__.py says how"
        )
    if foreign := list(find_foreign(config)):
        raise CheckpointError(
            f"Megatron-Core's model would not be that of config.json: {'; '.join(foreign)}; use --trainer embedded, which runs "
            "Transformers' own modules"
        )
    try:
        return _module(family).read(config)
    except KeyError as error:
        raise CheckpointError(f"config.json of a {family} model has no entry {error}") from error


def weights(architecture: Architecture) -> Iterator[Entry]:
    """Every tensor of the model in the order of export: embedding, layers, final norm, output layer, MTP layers."""
    a, layer = architecture, _module(architecture.family).layer
    first, last = ends(a)
    yield first
    for i in range(a.layers):
        yield from layer(a, f"decoder.layers.{i}", f"model.layers.{i}", a.sparse[i])
    yield from last
    for i in range(a.mtp):
        m, h = f"mtp.layers.{i}", f"model.layers.{a.layers + i}"
        for inner, outer in (("enorm", "enorm"), ("hnorm", "hnorm"), ("final_layernorm", "shared_head.norm")):
            yield Entry(f"{m}.{inner}.weight", (f"{h}.{outer}.weight",))
        yield Entry(f"{m}.eh_proj.weight", (f"{h}.eh_proj.weight",), "plain", 0)
        yield from layer(a, f"{m}.mtp_model_layer", h, a.sparse[-1])


def _module(family: str) -> Any:
    return import_module(f"{__name__}.{FAMILIES[family]}")
