"""float32 products of the shapes a training step has: torch.mm (MKL) against oneDNN, taking turns.

Backs ``miles_embedded/model/onednn.py``. The last line is one JSON object with GFLOP/s (medians) and their ratio a shape.
"""

from __future__ import annotations

import statistics
import time

import torch
from measure import finish, installed, options

SHAPES = ((7859, 128, 128), (1965, 128, 256), (1965, 256, 128), (512, 128, 128))


def rate(product, flops: int) -> float:
    """GFLOP/s of one call."""
    started = time.perf_counter()
    product()
    return flops / (time.perf_counter() - started) / 1e9


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=40, help="calls of each library a shape")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    shapes = {}
    for rows, inner, columns in SHAPES:
        x, w = torch.randn(rows, inner), torch.randn(columns, inner)
        sides = {
            "mkl": lambda x=x, w=w: torch.mm(x, w.t()),
            "onednn": lambda x=x, w=w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""),
        }
        seen: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(chosen.turns):
            for name, product in sides.items():
                seen[name].append(rate(product, 2 * rows * inner * columns))
        found = {name: round(statistics.median(values), 1) for name, values in seen.items()}
        shapes[f"{rows}x{inner}x{columns}"] = found | {"ratio": round(found["onednn"] / found["mkl"], 2)}
    result = {"threads": chosen.threads, "gflops": shapes}
    finish("products", result, chosen.save, lambda: installed("miles-core", "torch"))


if __name__ == "__main__":
    main()
