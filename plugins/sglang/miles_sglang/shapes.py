"""Checks that layer sizes fit SGLang's FP8 kernels: whole blocks, also for each part of a fused layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.plugin import ConfigError
from miles_formats import Codec

_BLOCK = 128


def check_blocks(config: Mapping[str, Any], codec: Codec) -> None:
    """Check that SGLang's FP8 kernels support the sizes of all quantised layers. (The embedded engine pads them.)

    Args:
        config: the language model's configuration.
        codec: codec of the run; other formats than FP8 always pass.

    Raises:
        ConfigError: names the first unsupported layer and the layers to keep in BF16."""
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
            f"--rollout-precision fp8: SGLang supports only multiples of {_BLOCK}, and {name} is {rows} x {columns}; keep such layers in "
            f"bf16 (--extra-high-precision-layers-hf {','.join(parts)}), or use --engine embedded"
        )


def _layers(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int, bool]]:
    """Yield (name, rows, columns, whether SGLang fuses it with other layers) for the linear layers of a decoder layer.

    Yields only the layers whose sizes the configuration contains.
    """
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
