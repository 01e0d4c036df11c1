"""float32 products by one library or the other, taking turns: torch.mm (MKL) against oneDNN for the shapes of a training step, and
for the few rows of a decode step the weights as right against left operand, and oneDNN, also with weights that it has put in order before.

Backs ``miles_embedded/model/onednn.py``. The last line is one JSON object with GFLOP/s, and with microseconds a product of few rows (medians).
"""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.measure import finish, installed, options

SHAPES = ((7859, 128, 128), (1965, 128, 256), (1965, 256, 128), (512, 128, 128))
#: Rows, inner and columns of a decode step's products; of each so many bytes of weights that a processor's cache does not hold them.
FEW = tuple(
    (rows, *shape)
    for shape in ((384, 1152), (1152, 384), (576, 1536), (1024, 3072), (3072, 1024))
    for rows in (1, 2, 4, 8, 16, 31, 64)
)
BYTES = 1 << 26


def rate(product, flops: int) -> float:
    """GFLOP/s of one call."""
    started = time.perf_counter()
    product()
    return flops / (time.perf_counter() - started) / 1e9


def few_rows(turns: int) -> dict[str, dict[str, float]]:
    """Microseconds a product, by shape."""
    found = {}
    for rows, inner, columns in FEW:
        x, weights = (
            torch.randn(rows, inner),
            [torch.randn(columns, inner) for _ in range(BYTES // (4 * inner * columns))],
        )
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, 64) for w in weights]
        twice = x if rows > 1 else torch.cat([x, x])
        sides = {
            "right": lambda x=x, weights=weights: [torch.nn.functional.linear(x, w) for w in weights],
            "left": lambda x=twice, weights=weights: [torch.mm(w, x.t()).t().contiguous() for w in weights],
            "onednn": lambda x=x, weights=weights: [
                torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in weights
            ],
            "packed": lambda x=x, weights=packed: [
                torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in weights
            ],
        }
        seen: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(turns):
            for name, products in sides.items():
                started = time.perf_counter()
                products()
                seen[name].append((time.perf_counter() - started) / len(weights) * 1e6)
        found[f"{rows}x{inner}x{columns}"] = {
            name: round(statistics.median(values), 1) for name, values in seen.items()
        }
    return found


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
    result = {"threads": chosen.threads, "gflops": shapes, "few_rows": few_rows(chosen.turns)}
    finish("products", result, chosen.save, lambda: installed("miles-core", "torch"))


if __name__ == "__main__":
    main()
