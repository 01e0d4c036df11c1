"""DeepSeek-V3 and R1: latent attention, grouped sigmoid routing with a correction bias, an MTP layer (arXiv 2412.19437)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_megatron.architecture import Architecture, Experts, Kind, Latent, common, dense_first, experts_of
from miles_megatron.families.parts import PROJECTIONS, Entry, attention, experts, mlp, norms, shared


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    latent = Latent(
        config.get("q_lora_rank") or 0,
        config["kv_lora_rank"],
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    given = common(config) | {"sparse": dense_first(config), "head_dim": latent.nope + latent.rope}
    return Architecture(**given, latent=latent, experts=grouped(config))


def grouped(config: Mapping[str, Any]) -> Experts:
    """Read the experts from the keys of DeepSeek-V3's configuration."""
    return Experts(
        experts_of(config),
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        shared=(config.get("n_shared_experts") or 0) * config["moe_intermediate_size"],
        score="sigmoid",
        renormalise=bool(config.get("norm_topk_prob", True)),
        correction=True,
        groups=config.get("n_group") or 1,
        top_groups=config.get("topk_group") or 1,
        scale=config.get("routed_scaling_factor") or 1.0,
        wide_router=True,
    )


def latent_attention(a: Architecture, m: str, h: str) -> Iterator[Entry]:
    """Yield the entries of multi-head latent attention."""
    assert a.latent is not None
    inner, outer = f"{m}.self_attention", f"{h}.self_attn"
    if a.latent.q_rank:
        yield Entry(f"{inner}.linear_q_down_proj.weight", (f"{outer}.q_a_proj.weight",), "plain", 0)
        yield Entry(f"{inner}.q_layernorm.weight", (f"{outer}.q_a_layernorm.weight",))
        yield Entry(f"{inner}.linear_q_up_proj.weight", (f"{outer}.q_b_proj.weight",), "plain", 0)
    else:
        yield Entry(f"{inner}.linear_q_proj.weight", (f"{outer}.q_proj.weight",), "plain", 0)
    yield Entry(f"{inner}.linear_kv_down_proj.weight", (f"{outer}.kv_a_proj_with_mqa.weight",), "plain", 0)
    yield Entry(f"{inner}.kv_layernorm.weight", (f"{outer}.kv_a_layernorm.weight",))
    yield Entry(f"{inner}.linear_kv_up_proj.weight", (f"{outer}.kv_b_proj.weight",), "plain", 0)
    yield Entry(f"{inner}.linear_proj.weight", (f"{outer}.o_proj.weight",), "plain", 1)


def layer(a: Architecture, m: str, h: str, kind: Kind) -> Iterator[Entry]:
    """Yield the entries of a layer; see ``miles_megatron.families``."""
    yield from norms(m, h)
    yield from attention(a, m, h) if a.latent is None else latent_attention(a, m, h)
    if kind.sparse:
        yield from experts(a, m, f"{h}.mlp", PROJECTIONS)
        yield from shared(a, m, f"{h}.mlp.shared_experts")
    else:
        yield from mlp(m, h)
