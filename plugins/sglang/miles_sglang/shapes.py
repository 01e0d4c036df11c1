"""Sizes that SGLang's FP8 kernels take: whole blocks, also of each part of a fused layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.format import Codec
from miles_core.plugin import ConfigError

_BLOCK = 128


def check_blocks(config: Mapping[str, Any], codec: Codec) -> None:
    """Refuse a model whose quantised layers SGLang cannot multiply in FP8; the embedded engine pads them.

    Args:
        config: of the language model.

    Raises:
        ConfigError: names the first such layer and what to leave in BF16."""
    if codec.format is None or codec.format.name != "fp8":
        return
    bad = [
        (name, rows, columns)
        for name, rows, columns, fused in _layers(config)
        if codec.quantises(name, (rows, columns)) and (columns % _BLOCK or (fused and rows % _BLOCK))
    ]
    if bad:
        name, rows, columns = bad[0]
        parts = sorted({one.split(".")[-2] for one, _, _ in bad})
        raise ConfigError(
            f"--rollout-precision fp8: SGLang multiplies whole blocks of {_BLOCK}, and {name} is {rows} x {columns}; leave such layers in "
            f"bf16 (--extra-high-precision-layers-hf {','.join(parts)}), or use --engine embedded"
        )


def _layers(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int, bool]]:
    """(name, rows, columns, fused with others in SGLang) of the linear layers of a decoder layer, as far as the configuration
    says them."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not hidden or not heads:
        return
    layer = f"model.layers.{config.get('num_hidden_layers', 1) // 2}"
    size = config.get("head_dim") or hidden // heads
    for part, count in (("q", heads), ("k", config.get("num_key_value_heads") or heads)):
        yield f"{layer}.self_attn.{part}_proj.weight", count * size, hidden, True
    yield f"{layer}.self_attn.o_proj.weight", hidden, heads * size, False
    experts = config.get("moe_intermediate_size")
    mlp, inner = (f"{layer}.mlp.experts.0", experts) if experts else (f"{layer}.mlp", config.get("intermediate_size"))
    if inner:
        yield f"{mlp}.gate_proj.weight", inner, hidden, True
        yield f"{mlp}.down_proj.weight", hidden, inner, False
