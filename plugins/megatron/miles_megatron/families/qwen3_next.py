"""Qwen3-Next: gated delta nets with full attention on every fourth layer, norms that multiply by 1 + weight, and routed experts with a gated
shared expert.

Full attention has a gate on its output, a norm over each head of queries and keys, and a partial rotary embedding. The checkpoint stores the
first projection of a gated delta net as two matrices, whose rows are grouped by head of keys: queries, keys, values and gate; beta and decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from miles_core.plugin import CheckpointError, layer_kinds
from miles_megatron.architecture import Architecture, Delta, Kind, Mixer, common
from miles_megatron.families import qwen3_moe
from miles_megatron.families.parts import Entry, norms

#: Names of Transformers' ``layer_types``.
_MIXERS: dict[str, Mixer] = {"linear_attention": "delta", "full_attention": "attention"}
#: Every how many layers one attends, if ``config.json`` does not list the layers.
_INTERVAL = 4
#: Share of a head's dimensions that is rotated, if ``config.json`` does not state it.
_ROTATED = 0.25


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    given = {"norm_topk_prob": True, **config}
    return qwen3_moe.with_experts(
        hybrid(config), given, shared=config["shared_expert_intermediate_size"], shared_gate=True
    )


def hybrid(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture without experts.

    Raises:
        CheckpointError: ``layer_types`` has another kind of layer, or not one per layer."""
    delta = Delta(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        config["linear_conv_kernel_dim"],
    )
    layers = config["num_hidden_layers"]
    every = config.get("full_attention_interval") or _INTERVAL
    listed = layer_kinds(config) or ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if unknown := sorted({*listed} - {*_MIXERS}):
        raise CheckpointError(
            f"layer_types of config.json has {unknown[0]}, and --trainer megatron has {', '.join(_MIXERS)}"
        )
    if len(listed) != layers:
        raise CheckpointError(f"config.json lists {len(listed)} layer_types, and num_hidden_layers is {layers}")
    return Architecture(
        **common({"partial_rotary_factor": _ROTATED, **config}),
        qk_norm="head",
        output_gate=True,
        centred=True,
        mixers=tuple(_MIXERS[kind] for kind in listed),
        delta=delta,
    )


def layer(a: Architecture, m: str, h: str, kind: Kind) -> Iterator[Entry]:
    """Yield the entries of a layer; see ``miles_megatron.families``."""
    yield from hybrid_layer(a, m, h, kind, _projection)


def hybrid_layer(
    a: Architecture, m: str, h: str, kind: Kind, projection: Callable[[Architecture, str, str], Entry]
) -> Iterator[Entry]:
    """Yield the entries of a layer. projection: entry of a gated delta net's first projection, from the prefixes of the delta net."""
    if kind.mixer == "attention":
        yield from qwen3_moe.layer(a, m, h, kind)
        return
    assert a.delta is not None
    d, inner, outer = a.delta, f"{m}.self_attention", f"{h}.linear_attn"
    yield from norms(m, h)
    yield projection(a, inner, outer)
    sections = ((d.keys, d.keys, d.values),)
    yield Entry(f"{inner}.conv1d.weight", (f"{outer}.conv1d.weight",), "sections", 0, sections=sections)
    for name in ("A_log", "dt_bias"):
        yield Entry(f"{inner}.{name}", (f"{outer}.{name}",), "plain", 0)
    yield Entry(f"{inner}.out_norm.weight", (f"{outer}.norm.weight",))
    yield Entry(f"{inner}.out_proj.weight", (f"{outer}.out_proj.weight",), "plain", 1)
    yield from qwen3_moe.feed_forward(a, m, h, kind)


def _projection(a: Architecture, m: str, h: str) -> Entry:
    assert a.delta is not None
    d = a.delta
    sections = ((d.keys, d.keys, d.values, d.values), (d.value_heads, d.value_heads))
    names = (f"{h}.in_proj_qkvz.weight", f"{h}.in_proj_ba.weight")
    return Entry(f"{m}.in_proj.weight", names, "sections", 0, sections=sections, groups=d.key_heads)
