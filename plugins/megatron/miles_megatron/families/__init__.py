"""The model families that ``--trainer megatron`` supports, one module each.

A family's module has two functions. ``read(config) -> Architecture`` parses ``config.json`` without importing torch.
``layer(architecture, m, h, kind)`` yields an ``Entry`` for every tensor of a layer; ``m`` is the prefix of the layer's names in
Megatron-Core, ``h`` the prefix in the checkpoint, and ``kind`` the kind of the layer. ``NAMES`` lists the names of tensors outside of
layers that differ from Llama's. To add a family, write such a module and add a line to ``FAMILIES``; ``parts`` has the building blocks
that families share. ``tests/test_families.py`` then compares names, counts and bytes with the model of Transformers.

Checkpoints store an MTP layer (DeepSeek-V3, arXiv 2412.19437, section 2.2) as decoder layer ``num_hidden_layers``: a layer like the last
one, with an additional projection and three norms. Some checkpoints also store copies of the embedding and the output layer there, which
the model shares with the MTP layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from miles_core.plugin import CheckpointError
from miles_megatron.architecture import Architecture
from miles_megatron.config_keys import find_foreign
from miles_megatron.families.parts import Entry, Names, ends

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
    "glm4_moe_lite": "glm4_moe_lite",
    "minimax_m2": "minimax_m2",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "ernie4_5": "ernie4_5",
    "olmoe": "olmoe",
    "nemotron_h": "nemotron_h",
    "bamba": "bamba",
    "gpt_oss": "gpt_oss",
    "qwen3_next": "qwen3_next",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
}

#: Families with gated delta nets.
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

#: Families with Mamba-2 mixers.
MAMBA = ("nemotron_h", "bamba")

#: ``model_type`` of checkpoints whose modules and entries are those of another family.
SAME = {"kimi_k2": "deepseek_v3"}

#: ``model_type`` -> features of this family that Megatron-Core 0.19 lacks.
LACKING = {
    "gemma2": "norms after attention and feed-forward layers, caps on scores and logits, and a scaled embedding",
    "gemma3_text": "norms after attention and feed-forward layers, a separate rotary base for layers with a window, and a scaled embedding",
}
LACKING |= {
    "gemma3": LACKING["gemma3_text"],
    "gemma3n": "inputs per layer, several residual streams, and keys that layers share",
    "gemma3n_text": "inputs per layer, several residual streams, and keys that layers share",
    "gemma4": "norms after attention and feed-forward layers, and heads of two sizes",
    "gemma4_text": "norms after attention and feed-forward layers, and heads of two sizes",
    "glm4": "norms after attention and feed-forward layers",
    "llama4": "attention in chunks, layers without rotary embedding, and scores that weigh the experts' input",
    "llama4_text": "attention in chunks, layers without rotary embedding, and scores that weigh the experts' input",
    "deepseek_v32": "attention whose keys an indexer chooses (in the modules that are used here)",
    "glm_moe_dsa": "attention whose keys an indexer chooses (in the modules that are used here)",
    "granite": "a factor of the output of attention and feed-forward layers (residual_multiplier)",
    "hyperclovax": "a factor of the output of attention and feed-forward layers (residual_multiplier)",
    "minicpm3": "a factor of the output of attention and feed-forward layers (scale_depth)",
    "cohere": "attention and feed-forward layers that read the same norm in parallel",
    "phimoe": "routing by sparsemixer",
    "hunyuan_v1_dense": "norms of queries and keys after the rotary embedding",
    "ministral3": "queries that are multiplied by a factor of their position (llama_4_scaling_beta)",
    "olmo2": "norms after attention and feed-forward layers instead of before them",
    "olmo_hybrid": "norms after attention and feed-forward layers instead of before them",
    "kimi_linear": "delta attention with a decay per channel",
    "bailing_hybrid": "delta attention with a decay per channel",
    "lfm2": "short convolutions in place of attention",
    "falcon_h1": "layers with attention and Mamba-2 in parallel",
    "mamba": "the first version of Mamba",
}
LACKING |= {
    **dict.fromkeys(("granitemoe", "granitemoehybrid"), LACKING["granite"]),
    "cohere2": LACKING["cohere"],
    "olmo3": LACKING["olmo2"],
    **dict.fromkeys(("lfm2_moe", "lfm3"), LACKING["lfm2"]),
    **dict.fromkeys(("falcon_mamba", "jamba"), LACKING["mamba"]),
}


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture of a checkpoint.

    Args:
        config: the parsed ``config.json``.

    Raises:
        CheckpointError: the family is not supported, an entry has an unsupported value, or an entry is missing.
    """
    family = str(config.get("model_type"))
    if family in SAME:
        family = SAME[family]
        config = {**config, "model_type": family}
    if family in LACKING:
        raise CheckpointError(
            f"Megatron-Core does not support model_type {family} of config.json; it lacks {LACKING[family]}; use --trainer embedded"
        )
    if family not in FAMILIES:
        raise CheckpointError(
            f"the megatron plugin has no table of weights for model_type {family} of config.json; it has {', '.join(FAMILIES)}. Use "
            "--trainer embedded, or add a table; miles_megatron/families/__init__.py describes how"
        )
    if foreign := list(find_foreign(config)):
        raise CheckpointError(
            f"Megatron-Core's model would differ from that of config.json: {'; '.join(foreign)}; use --trainer embedded, which runs "
            "Transformers' modules"
        )
    try:
        return _module(family).read(config)
    except KeyError as error:
        raise CheckpointError(f"config.json of a {family} model has no entry {error}") from error


def weights(architecture: Architecture) -> Iterator[Entry]:
    """Yield every tensor of the model in export order: embedding, layers, final norm, output layer, MTP layers."""
    a, module = architecture, _module(architecture.family)
    layer, names = module.layer, getattr(module, "NAMES", Names())
    first, last = ends(a, names)
    yield first
    for i in range(a.layers):
        yield from layer(a, f"decoder.layers.{i}", f"{names.layers}.{i}", a.kinds[i])
    yield from last
    for i in range(a.mtp):
        m, h = f"mtp.layers.{i}", f"{names.layers}.{a.layers + i}"
        for inner, outer in (("enorm", "enorm"), ("hnorm", "hnorm"), ("final_layernorm", "shared_head.norm")):
            yield Entry(f"{m}.{inner}.weight", (f"{h}.{outer}.weight",))
        yield Entry(f"{m}.eh_proj.weight", (f"{h}.eh_proj.weight",), "plain", 0)
        yield from layer(a, f"{m}.mtp_model_layer", h, a.mtp_kind)


def _module(family: str) -> Any:
    return import_module(f"{__name__}.{FAMILIES[family]}")
