"""Number formats for which TransformerEngine has a recipe. Imports neither torch nor TransformerEngine.

The manifest sets ``NVTE_BACKWARD_OVERRIDE`` so that the backward pass multiplies dequantised operands in BF16, as in the other trainers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miles_megatron.architecture import Architecture
from miles_megatron.sizes import Sizes

#: Number format -> fields of Megatron-Core's TransformerConfig.
RECIPES: dict[str, dict[str, Any]] = {
    "fp8": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
#: Number format of the trainer -> rows and columns that share a scale, which decide how matrices can be sharded; for int4, the default group
#: size. The manifest declares these formats.
TILES = {"fp8": (128, 128), "mxfp8": (1, 32), "int4": (1, 128)}
#: TransformerEngine's quantised GEMMs require a multiple of this many activation rows.
ROWS = 128


def cuts(a: Architecture, s: Sizes, tile: tuple[int, int]) -> Iterator[str]:
    """Yield each condition that the model must meet so that no tile crosses the shards and parts of Megatron-Core's matrices.

    Args:
        a: the architecture.
        s: parallel sizes that pass ``misfits``.
        tile: rows and columns that share a scale.
    """
    rows, columns = tile
    if a.latent is None and a.head_dim % rows:
        yield f"heads of a multiple of {rows}, not {a.head_dim}"
    widths = [(a.q_size // s.tp, "inputs of attention's output projection", s.tp)] if a.latent is None else []
    if a.delta is not None:
        widths.append((a.delta.values // s.tp, "inputs of a gated delta net's output projection", s.tp))
        if a.delta.value_heads // s.tp % rows:
            yield f"gated delta nets with a multiple of {rows} heads on a rank, not {a.delta.value_heads // s.tp}"
    if a.mamba is not None:
        d = a.mamba
        sizes = (d.inner // s.tp, d.shared // s.tp, d.heads // s.tp)
        widths.append((d.inner // s.tp, "inputs of a Mamba-2 mixer's output projection", s.tp))
        if any(size % rows for size in sizes):
            yield f"Mamba-2 mixers whose first projection joins parts of a multiple of {rows} rows on a rank, not {', '.join(map(str, sizes))}"
    if any(kind.feed and not kind.sparse for kind in a.kinds):
        widths.append((a.ffn // s.tp, "inner units of a dense layer", s.tp))
    if a.experts is not None:
        widths.append((a.experts.ffn // s.etp, "inner units of an expert", s.etp))
        if a.experts.shared:
            widths.append((a.experts.shared // s.tp, "inner units of the shared experts", s.tp))
    for width, what, ranks in widths:
        if width % rows or (ranks > 1 and width % columns):
            yield f"{what} on a rank that are a multiple of {max(tile)}, not {width}"
