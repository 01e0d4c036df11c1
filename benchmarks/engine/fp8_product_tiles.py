"""Microseconds of the FP8 product's own kernel for each tile, split of K and number of stages, against the BF16 product and cuBLAS's scaled one.

The rule in ``miles_fp8.product_kernels.blocks`` is a fit to these numbers: ``regret`` is what its choice takes relative to the fastest configuration,
for the shapes and rows that the kernel computes. Codes are given, so quantisation is not counted, and products follow one another. In a decode step
they follow other kernels, which occupy multiprocessors when the product's programs are placed: compare final candidates with ``decode_step.py``.
Shapes and method are those of ``fp8_product.py``; processes compile the configurations in parallel first. The last line is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import statistics
import sys
from functools import partial
from typing import Any

import torch

from benchmarks.engine.fp8_product import FORMAT, L2, SHAPES, microseconds
from benchmarks.measure import finish, installed, options
from miles_fp8 import kernels, product_kernels
from miles_fp8.layout import CODES, SCALES

Config = tuple[int, int, int, int, int]
#: BLOCK_ROWS, BLOCK_COLUMNS, SPLITS, warps and stages. Large tiles need more warps, and their stages more shared memory than there is.
CONFIGS: list[Config] = [
    (rows, columns, splits, warps, stages)
    for rows, columns, splits, warps, stages in itertools.product(
        (16, 32, 64, 128), (64, 128), (1, 2, 4), (4, 8), (3, 4)
    )
    if warps == (8 if rows * columns > 8192 else 4) or rows * columns in (4096, 8192)
    if rows * columns < 16384 or stages == 3
]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile (default: 14)")
    given = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        pool.map(compile_all, [CONFIGS[number :: given.jobs] for number in range(given.jobs)], 1)
    product = FORMAT.product(torch.device("cuda"), torch.bfloat16)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    regrets = []
    for name, rows in itertools.product(given.shapes, given.rows):
        found[f"{name} {rows}"] = entry = measure(product, *SHAPES[name], rows)
        if "regret" in entry:
            regrets.append(entry["regret"])
        print(f"{name} {rows}: {json.dumps(entry)}", file=sys.stderr, flush=True)
    found["mean_regret"] = round(statistics.geometric_mean(regrets), 4)
    found["largest_regret"] = max(regrets)
    finish("fp8_product_tiles", found, given.save, lambda: installed("torch", "triton"))


def compile_all(configs: list[Config]) -> None:
    """Compile the kernel in these configurations; later processes find them on the disk."""
    product = FORMAT.product(torch.device("cuda"), torch.bfloat16)
    weight = product.prepare(FORMAT.quantize(torch.randn(2048, 1536, device="cuda").bfloat16()))
    for rows in (1, 256):  # the strides of a single row are compiled separately
        codes = kernels.activation_codes(torch.randn(rows, 1536, device="cuda").bfloat16(), False)
        for config in configs:
            multiply(product, codes, weight, rows, config)
    torch.cuda.synchronize()


def multiply(product: Any, codes: Any, weight: Any, rows: int, config: Config) -> torch.Tensor:
    """The product of given codes in one configuration."""
    matrix, scales = weight[CODES].t(), weight[SCALES].t()
    return product_kernels.linear(codes[0], codes[1], matrix, scales, None, product.tickets, False, config, rows)


def measure(product: Any, width: int, inner: int, rows: int) -> dict[str, Any]:
    """Microseconds of one shape and number of rows."""
    copies = min(48, max(2, -(-L2 // (width * inner))))
    x = torch.randn(rows, inner, device="cuda").bfloat16()
    plain = [torch.randn(width, inner, device="cuda").bfloat16() for _ in range(copies)]
    weights = [product.prepare(FORMAT.quantize(weight)) for weight in plain]
    codes, scales = kernels.activation_codes(x, False)
    kinds = torch.nn.functional.ScalingType

    def cublas(weight: Any) -> torch.Tensor:
        scaling = (kinds.BlockWise1x128, weight[SCALES], kinds.BlockWise128x128)
        return torch.nn.functional.scaled_mm(codes, weight[CODES], scales, *scaling, output_dtype=torch.bfloat16)

    def ours(config: Config) -> float:
        return microseconds([partial(multiply, product, (codes, scales), w, rows, config) for w in weights], 3)

    times = {config: ours(config) for config in CONFIGS if rows / 8 <= config[0] <= max(16, rows)}
    best = min(times, key=lambda config: times[config])
    entry = {
        "bf16": microseconds([partial(torch.nn.functional.linear, x, w) for w in plain], 3),
        "cublas": microseconds([partial(cublas, w) for w in weights], 3),
        "best": [list(best), times[best]],
    }
    if product_kernels.takes(rows, width, inner):
        chosen = product_kernels.blocks(rows, width, inner)
        entry |= {"chosen": [list(chosen), times[chosen]], "regret": round(times[chosen] / times[best], 3)}
    return entry


if __name__ == "__main__":
    main()
