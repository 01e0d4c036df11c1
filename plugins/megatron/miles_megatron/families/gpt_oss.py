"""gpt-oss: attention with sinks and a sliding window on every other layer; experts with biases, stacked in one tensor per layer.

The checkpoint stores the experts' first matrices as [experts, hidden, 2 x inner] with gate and up in alternate columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from miles_megatron.architecture import Architecture, Experts, Kind, common, experts_of
from miles_megatron.families.parts import Entry, Layout, attention, norms


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    a = Architecture(**common(config), qkv_bias=True, out_bias=True, mlp_bias=True, sinks=True)
    return replace(
        a,
        sparse=(True,) * a.layers,
        experts=Experts(experts_of(config), config["num_experts_per_tok"], a.ffn),
    )


def layer(a: Architecture, m: str, h: str, kind: Kind) -> Iterator[Entry]:
    """Yield the entries of a layer; see ``miles_megatron.families``."""
    assert a.experts is not None
    yield from (*norms(m, h), *attention(a, m, h))
    for part in ("weight", "bias"):
        yield Entry(f"{m}.mlp.router.{part}", (f"{h}.mlp.router.{part}",))
    experts: tuple[tuple[str, Layout, int], ...] = (("linear_fc1", "stacked_gate_up", 0), ("linear_fc2", "stacked", 1))
    for inner, layout, axis in experts:
        outer = f"{h}.mlp.experts.{'gate_up_proj' if inner == 'linear_fc1' else 'down_proj'}"
        for e in range(a.experts.count):
            name = f"{m}.mlp.experts.local_experts.{e}.{inner}"
            yield Entry(f"{name}.weight", (outer,), layout, axis, e)
        for e in range(a.experts.count):
            name = f"{m}.mlp.experts.local_experts.{e}.{inner}"
            split = 0 if inner == "linear_fc1" else None
            yield Entry(f"{name}.bias", (f"{outer}_bias",), layout, split, e)
