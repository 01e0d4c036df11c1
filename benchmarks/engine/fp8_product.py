"""Microseconds of one FP8 product inside a CUDA graph against the BF16 product of the same shape: linear layers and experts of decode batches.

Weights alternate between copies that together exceed the L2 cache. ``fp8`` is what ``miles_fp8.product`` chooses, with the quantisation of its
input; ``cublas`` is that quantisation and torch's scaled product; ``bf16`` of experts are the embedded backend's kernels. The shapes are the
joint query-key-value, output, joint gate-up and down matrices of the models of ``sglang_engine.py``. The last line is one JSON object.

``--tiles`` measures the product's own kernel for each tile, split of K and number of stages instead. ``regret`` is what the choice of
``miles_fp8.product_kernels.blocks``, which is a fit to these numbers, takes relative to the fastest configuration. Codes are given, so
quantisation is not counted, and products follow one another: in a decode step they follow other kernels, which occupy multiprocessors when the
product's programs are placed. Processes compile the configurations in parallel first.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import finish, installed, options
from miles_fp8 import kernels, product_kernels
from miles_fp8.format import Fp8
from miles_fp8.layout import CODES, SCALES

Config = tuple[int, int, int, int, int]

SHAPES = {
    "dense qkv": (2048, 1536),
    "dense out": (1536, 1536),
    "dense gate_up": (8192, 1536),
    "dense down": (1536, 4096),
    "moe qkv": (2560, 1024),
    "moe out": (1024, 2048),
    "8b qkv": (6144, 4096),
    "8b out": (4096, 4096),
    "8b gate_up": (24576, 4096),
    "8b down": (4096, 12288),
}
#: experts, hidden, inner, chosen
EXPERTS = {"moe": (32, 1024, 512, 4), "30b": (128, 2048, 768, 8)}
FORMAT = Fp8()
L2 = 200_000_000
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
    parser.add_argument("--tiles", action="store_true", help="measure every configuration of the kernel")
    parser.add_argument("--rows", type=int, nargs="+", help="default: 1 to 256, with --tiles to 512")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile for --tiles (default: 14)")
    given = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    if given.tiles:
        found |= measure_tiles(given.shapes, given.rows or [1, 16, 32, 64, 128, 256, 512], given.jobs)
        finish("fp8_product_tiles", found, given.save, lambda: installed("torch", "triton"))
        return
    product = FORMAT.product(torch.device("cuda"), torch.bfloat16)
    every = given.rows or [1, 4, 16, 32, 64, 128, 256]
    for name in given.shapes:
        found[name] = {rows: linear(product, rows, *SHAPES[name]) for rows in every}
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    for name, shape in EXPERTS.items():
        found[f"{name} experts"] = {rows: experts(product, rows, *shape) for rows in every}
        print(f"{name} experts: {json.dumps(found[f'{name} experts'])}", file=sys.stderr, flush=True)
    finish("fp8_product", found, given.save, lambda: installed("torch", "triton"))


def make_layers(product: Any, rows: int, n: int, k: int) -> tuple[Tensor, list[Tensor], list[Any]]:
    """Return an input [rows, k], and BF16 weights [n, k] with their codes, in copies that exceed the L2 cache."""
    copies = min(48, max(2, -(-L2 // (n * k))))
    x = torch.randn(rows, k, device="cuda").bfloat16()
    plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(copies)]
    return x, plain, [product.prepare(FORMAT.quantize(weight)) for weight in plain]


def scaled(row_codes: Tensor, scales: Tensor, weight: Any) -> Tensor:
    """Return torch's scaled product of codes."""
    kinds = torch.nn.functional.ScalingType
    scaling = (kinds.BlockWise1x128, weight[SCALES], kinds.BlockWise128x128)
    return torch.nn.functional.scaled_mm(row_codes, weight[CODES], scales, *scaling, output_dtype=torch.bfloat16)


def linear(product: Any, rows: int, n: int, k: int) -> dict[str, float]:
    x, plain, codes = make_layers(product, rows, n, k)
    return {
        "bf16": microseconds([lambda w=w: torch.nn.functional.linear(x, w) for w in plain]),
        "cublas": microseconds([lambda w=w: scaled(*kernels.activation_codes(x, False), w) for w in codes]),
        "fp8": microseconds([lambda w=w: product(x, w) for w in codes]),
    }


def experts(product: Any, rows: int, count: int, dim: int, inner: int, k: int) -> dict[str, float]:
    from miles_embedded.kernels.experts import sorted_places
    from miles_embedded.kernels.grouped import gated_product
    from miles_embedded.kernels.grouped import product as grouped

    x = torch.randn(rows, dim, device="cuda").bfloat16()
    index = torch.rand(rows, count, device="cuda").topk(k).indices
    _, _, row, ends = sorted_places(index, count)
    copies = 2 if count > 64 else 6
    up = [torch.randn(count, 2 * inner, dim, device="cuda").bfloat16() / dim**0.5 for _ in range(copies)]
    down = [torch.randn(count, dim, inner, device="cuda").bfloat16() / inner**0.5 for _ in range(copies)]
    pairs = [(stack(a), stack(b)) for a, b in zip(up, down, strict=True)]
    plain = zip(up, down, strict=True)
    return {
        "bf16": microseconds([lambda a=a, b=b: grouped(gated_product(x, a, row, ends), b, ends) for a, b in plain]),
        "fp8": microseconds([lambda a=a, b=b: product.experts(x, row, ends, a, b) for a, b in pairs]),
    }


def stack(weights: Tensor) -> dict[str, Tensor]:
    parts = [FORMAT.quantize(weight) for weight in weights]
    return {name: torch.stack([part[name] for part in parts]) for name in (CODES, SCALES)}


def measure_tiles(shapes: list[str], every: list[int], jobs: int) -> dict[str, Any]:
    """Return microseconds by shape and rows, and the mean and largest regret."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        pool.map(compile_all, [CONFIGS[number::jobs] for number in range(jobs)], 1)
    product = FORMAT.product(torch.device("cuda"), torch.bfloat16)
    found: dict[str, Any] = {}
    for name, rows in itertools.product(shapes, every):
        found[f"{name} {rows}"] = tiles(product, *SHAPES[name], rows)
        print(f"{name} {rows}: {json.dumps(found[f'{name} {rows}'])}", file=sys.stderr, flush=True)
    regrets = [entry["regret"] for entry in found.values() if "regret" in entry]
    return found | {"mean_regret": round(statistics.geometric_mean(regrets), 4), "largest_regret": max(regrets)}


def compile_all(configs: list[Config]) -> None:
    """Compile the kernel in these configurations; later processes find them on the disk."""
    product = FORMAT.product(torch.device("cuda"), torch.bfloat16)
    weight = product.prepare(FORMAT.quantize(torch.randn(2048, 1536, device="cuda").bfloat16()))
    for rows in (1, 256):  # the strides of a single row are compiled separately
        codes = kernels.activation_codes(torch.randn(rows, 1536, device="cuda").bfloat16(), False)
        for config in configs:
            multiply(product, codes, weight, rows, config)
    torch.cuda.synchronize()


def multiply(product: Any, codes: Any, weight: Any, rows: int, config: Config) -> Tensor:
    """The product of given codes in one configuration."""
    matrix, scales = weight[CODES].t(), weight[SCALES].t()
    return product_kernels.linear(codes[0], codes[1], matrix, scales, None, product.tickets, False, config, rows)


def tiles(product: Any, width: int, inner: int, rows: int) -> dict[str, Any]:
    """Return the microseconds of one shape and number of rows."""
    x, plain, weights = make_layers(product, rows, width, inner)
    codes, scales = kernels.activation_codes(x, False)

    def ours(config: Config) -> float:
        return microseconds([partial(multiply, product, (codes, scales), w, rows, config) for w in weights], 3)

    times = {config: ours(config) for config in CONFIGS if rows / 8 <= config[0] <= max(16, rows)}
    best = min(times, key=lambda config: times[config])
    entry = {
        "bf16": microseconds([partial(torch.nn.functional.linear, x, w) for w in plain], 3),
        "cublas": microseconds([partial(scaled, codes, scales, w) for w in weights], 3),
        "best": [list(best), times[best]],
    }
    if product_kernels.takes(rows, width, inner):
        chosen = product_kernels.blocks(rows, width, inner)
        entry |= {"chosen": [list(chosen), times[chosen]], "regret": round(times[chosen] / times[best], 3)}
    return entry


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Of one call, in a graph of all calls; the fastest of three measurements."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1000 * start.elapsed_time(end) / repeats / len(calls))
    return round(min(found), 2)


if __name__ == "__main__":
    main()
