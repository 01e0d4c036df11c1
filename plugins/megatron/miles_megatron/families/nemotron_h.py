"""Nemotron-H, and Nemotron 3 with experts: every layer is one of Mamba-2, attention without position embedding, an MLP or experts.

MLPs and experts have no gate, and their activation is the squared ReLU. Experts are routed like DeepSeek-V3's (arXiv 2504.03624; the
configuration of Nemotron 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from miles_core.plugin import CheckpointError, layer_kinds
from miles_megatron.architecture import Architecture, Kind, Mamba, Mixer, Rotary, common
from miles_megatron.families.deepseek_v3 import grouped
from miles_megatron.families.parts import Entry, Names, attention, experts, mamba, projections, shared

NAMES = Names("backbone.embeddings", "backbone.layers", "backbone.norm_f")
#: The names of up and down.
_PARTS = ("up_proj", "down_proj")
#: Transformers' kind of layer -> its mixer.
_MIXERS: dict[str, Mixer] = {"linear_attention": "mamba", "full_attention": "attention", "moe": "none", "mlp": "none"}


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``.

    Raises:
        CheckpointError: a layer is of another kind."""
    listed = layer_kinds(config) or ("linear_attention", "moe", "full_attention", "mlp")
    if unknown := sorted({*listed} - {*_MIXERS}):
        raise CheckpointError(
            f"config.json has a layer of kind {unknown[0]}, and --trainer megatron has {', '.join(_MIXERS)}"
        )
    size = config.get("head_dim") or config.get("attention_head_dim") or 128
    given = common({**config, "num_hidden_layers": len(listed), "head_dim": size, "num_nextn_predict_layers": 0})
    chosen = None
    if "moe" in listed:
        shared_size, latent = config["moe_shared_expert_intermediate_size"], config.get("moe_latent_size") or 0
        chosen = replace(grouped(config), shared=shared_size, latent=latent)
    return Architecture(
        **given
        | {
            "epsilon": config.get("layer_norm_epsilon", 1e-5),
            "rotary": Rotary(share=0.0),
            "padding": None,  # Transformers' embedding of this family has none
            "sparse": tuple(kind == "moe" for kind in listed),
        },
        mixers=tuple(_MIXERS[kind] for kind in listed),
        feeds=tuple(_MIXERS[kind] == "none" for kind in listed),
        gated=False,
        experts=chosen,
        mamba=Mamba(
            config["mamba_num_heads"],
            config["mamba_head_dim"],
            config["n_groups"],
            config["ssm_state_size"],
            config.get("conv_kernel", 4),
            config.get("chunk_size", 128),
        ),
    )


def layer(a: Architecture, m: str, h: str, kind: Kind) -> Iterator[Entry]:
    """Yield the entries of a layer; see ``miles_megatron.families``."""
    norm = "pre_mlp_layernorm" if kind.feed else "input_layernorm"
    yield Entry(f"{m}.{norm}.weight", (f"{h}.norm.weight",))
    if kind.mixer == "mamba":
        yield from mamba(a, m, f"{h}.mixer")
    elif kind.mixer == "attention":
        yield from attention(a, m, h, "mixer")
    elif kind.sparse:
        yield from experts(a, m, f"{h}.mixer", _PARTS)
        if a.experts is not None and a.experts.latent:
            for name in ("fc1_latent_proj", "fc2_latent_proj"):
                yield Entry(f"{m}.mlp.{name}.weight", (f"{h}.mixer.{name}.weight",))
        yield from shared(a, m, f"{h}.mixer.shared_experts", _PARTS)
    else:
        yield from projections(f"{m}.mlp", tuple(f"{h}.mixer.{part}" for part in _PARTS))
