"""Which number formats TransformerEngine computes in with recipes of its own. Imports neither torch nor TransformerEngine.

Its backward pass multiplies the dequantised operands in BF16, as core's other trainers do: ``NVTE_BACKWARD_OVERRIDE`` in the manifest.
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
#: Number format -> rows and columns that share a scale; int4's columns are its group's.
TILES = {"fp8": (128, 128), "mxfp8": (1, 32), "int4": (1, 128)}
#: Rows of activations that TransformerEngine's quantised products want a multiple of.
ROWS = 128


def cuts(a: Architecture, s: Sizes, tile: tuple[int, int]) -> Iterator[str]:
    """What keeps a format's tiles from lying inside of the parts of Megatron-Core's matrices.

    Args:
        a: the model.
        s: parallel sizes, which divide it.
        tile: rows and columns that share a scale.
    """
    rows, columns = tile
    if a.latent is None and a.head_dim % rows:
        yield f"heads of a multiple of {rows}, not {a.head_dim}"
    widths = [(a.q_size // s.tp, "inputs of attention's output projection", s.tp)] if a.latent is None else []
    if not all(a.sparse):
        widths.append((a.ffn // s.tp, "inner units of a dense layer", s.tp))
    if a.experts is not None:
        widths.append((a.experts.ffn // s.etp, "inner units of an expert", s.etp))
        if a.experts.shared:
            widths.append((a.experts.shared // s.tp, "inner units of the shared experts", s.tp))
    for width, what, ranks in widths:
        if width % rows or (ranks > 1 and width % columns):
            yield f"{what} on a rank that are a multiple of {max(tile)}, not {width}"
