"""Qwen3-MoE: Qwen3's attention, experts without shared ones, softmax routing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from miles_megatron.architecture import Architecture, Experts, Kind, common, experts_of
from miles_megatron.families.parts import PROJECTIONS, Entry, attention, experts, mlp, norms, shared


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    made = Architecture(**common(config), qk_norm="head")
    return with_experts(made, config)


def with_experts(a: Architecture, config: Mapping[str, Any], **more: Any) -> Architecture:
    """Add the experts of a Qwen configuration to an architecture; ``more`` are further arguments of ``Experts``."""
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    return replace(
        a,
        sparse=tuple((i + 1) % step == 0 and i not in dense for i in range(a.layers)),
        experts=Experts(
            experts_of(config),
            config["num_experts_per_tok"],
            config["moe_intermediate_size"],
            renormalise=bool(config.get("norm_topk_prob", False)),
            **more,
        ),
    )


def layer(a: Architecture, m: str, h: str, kind: Kind) -> Iterator[Entry]:
    """Yield the entries of a layer; see ``miles_megatron.families``."""
    yield from (*norms(m, h), *attention(a, m, h), *feed_forward(a, m, h, kind))


def feed_forward(a: Architecture, m: str, h: str, kind: Kind) -> Iterator[Entry]:
    """Yield the entries of a dense layer's MLP, or of router, experts and shared expert."""
    if not kind.sparse:
        yield from mlp(m, h)
        return
    yield from experts(a, m, f"{h}.mlp", PROJECTIONS)
    yield from shared(a, m, f"{h}.mlp.shared_expert")
    if a.experts is not None and a.experts.shared_gate:
        yield Entry(f"{m}.mlp.shared_experts.gate_weight", (f"{h}.mlp.shared_expert_gate.weight",))
