"""Microseconds of one INT4 product inside a CUDA graph against the BF16 product of the same shape, for decode batches.

``tinygemm`` is torch's own weight-only kernel (``torch.ops.aten._weight_int4pack_mm``), ``dequantize`` the embedded backend's product: the format's
kernel writes BF16 weights, which are multiplied. Weights alternate between copies that together exceed the L2 cache. The shapes are those of
``fp8_product.py``. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from benchmarks.engine.fp8_product import L2, SHAPES, microseconds
from benchmarks.measure import finish, installed, options
from miles_int4.format import Int4

FORMAT = Int4(128)
#: Inner tiles of tinygemm's layout; 8 is its fastest for long rows.
INNER_TILES = 8


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 256])
    given = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name, (n, k) in SHAPES.items():
        found[name] = {rows: linear(rows, n, k) for rows in given.rows}
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    finish("int4_product", found, given.save, lambda: installed("torch", "triton"))


def linear(rows: int, n: int, k: int) -> dict[str, float]:
    x = torch.randn(rows, k, device="cuda").bfloat16()
    plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(count_copies(2 * n * k))]
    stored = [FORMAT.quantize(weight) for weight in plain[:4]]
    pairs = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device="cuda")  # speed depends on no value
    packed = [torch.ops.aten._convert_weight_to_int4pack(pairs, INNER_TILES) for _ in range(count_copies(n * k // 2))]
    scales = torch.ones(k // FORMAT.group_size, n, 2, device="cuda").bfloat16()
    multiply = torch.nn.functional.linear
    return {
        "bf16": microseconds([lambda w=w: multiply(x, w) for w in plain]),
        "tinygemm": microseconds(
            [lambda w=w: torch.ops.aten._weight_int4pack_mm(x, w, FORMAT.group_size, scales) for w in packed]
        ),
        "dequantize": microseconds([lambda w=w: multiply(x, FORMAT.dequantize(w).to(x.dtype)) for w in stored]),
    }


def count_copies(nbytes: int) -> int:
    """Number of weights of ``nbytes`` that together exceed the L2 cache."""
    return min(96, max(2, -(-L2 // nbytes)))


if __name__ == "__main__":
    main()
