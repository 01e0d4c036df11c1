"""Microseconds of one FP8 product inside a CUDA graph against the BF16 product of the same shape: linear layers and experts of decode batches.

Weights alternate between copies that together exceed the L2 cache. ``fp8`` is what ``miles_fp8.product`` chooses, with the quantisation of its
input; ``cublas`` is that quantisation and torch's scaled product; ``bf16`` of experts are the embedded backend's kernels. The shapes are the
joint query-key-value, output, joint gate-up and down matrices of the models of ``sglang_engine.py``. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import finish, installed, options
from miles_fp8 import kernels
from miles_fp8.format import Fp8
from miles_fp8.layout import CODES, SCALES

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


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128, 256])
    given = parser.parse_args()
    product = FORMAT.product(torch.device("cuda"), torch.bfloat16)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name, (n, k) in SHAPES.items():
        found[name] = {rows: linear(product, rows, n, k) for rows in given.rows}
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    for name, shape in EXPERTS.items():
        found[f"{name} experts"] = {rows: experts(product, rows, *shape) for rows in given.rows}
        print(f"{name} experts: {json.dumps(found[f'{name} experts'])}", file=sys.stderr, flush=True)
    finish("fp8_product", found, given.save, lambda: installed("torch", "triton"))


def linear(product: Any, rows: int, n: int, k: int) -> dict[str, float]:
    copies = min(48, max(2, -(-L2 // (n * k))))
    x = torch.randn(rows, k, device="cuda").bfloat16()
    plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(copies)]
    codes = [product.prepare(FORMAT.quantize(weight)) for weight in plain]
    kinds = torch.nn.functional.ScalingType

    def cublas(weight: Any) -> Tensor:
        row_codes, scales = kernels.activation_codes(x, False)
        scaling = (kinds.BlockWise1x128, weight[SCALES], kinds.BlockWise128x128)
        return torch.nn.functional.scaled_mm(row_codes, weight[CODES], scales, *scaling, output_dtype=torch.bfloat16)

    return {
        "bf16": microseconds([lambda w=w: torch.nn.functional.linear(x, w) for w in plain]),
        "cublas": microseconds([lambda w=w: cublas(w) for w in codes]),
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
