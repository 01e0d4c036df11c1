"""Time of the kernels of ``true_on_policy`` and of the libraries' functions that they replace, on a GPU; part of ``true_on_policy.py``.

Which rows of a library's product change with the number of rows is counted, too: plain, and with the variables that fix cuBLASLt's
workspace (in a process of its own, because they are read when the first handle is made).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

#: (inner, columns) of the products: of the dense model and the mixture of experts of ``sglang_engine.py``, and of Qwen3-8B.
SHAPES = ((1536, 2048), (1536, 8960), (8960, 1536), (1024, 32000), (4096, 4096), (4096, 24576), (12288, 4096))
ROWS = (1, 8, 64, 256, 2048, 16384)
VARIABLES = {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "TORCH_BLAS_PREFER_CUBLASLT": "1"}


def measure_kernels() -> dict[str, Any]:
    """Microseconds of products and attention, and the numbers of rows whose results differ with the libraries."""
    return {
        "products": measure_products(),
        "attention": measure_attention(),
        "library_rows_that_differ": find_differing(),
        "library_sizes_that_differ": find_sizes(),
        "library_rows_that_differ_with_fixed_workspace": _in_process(VARIABLES),
    }


def _median(function: Any) -> float:
    from triton.testing import do_bench

    return float(do_bench(function, warmup=5, rep=20, return_mode="median")) * 1e3


def measure_products() -> dict[str, Any]:
    """Shape -> rows -> [library, plugin] in microseconds, in BF16."""
    from miles_true_on_policy.products import multiply_rows

    found: dict[str, Any] = {}
    for inner, columns in SHAPES:
        weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
        for rows in ROWS:
            x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
            both = [_median(lambda f=f, x=x, w=weight: f(x, w)) for f in (torch.nn.functional.linear, multiply_rows)]
            found.setdefault(f"{inner}x{columns}", {})[rows] = [round(t, 1) for t in both]
    return found


def measure_attention() -> dict[str, Any]:
    """Sequences x length -> [flash, plugin] in microseconds: 16 heads, 8 key/value heads of 128, causal, forward."""
    from miles_core.contracts.trainer import Context
    from miles_embedded import PromptCall
    from miles_embedded.model.flash import flash_supports
    from miles_true_on_policy.tiles import attend_by_tiles

    class Layer:
        layer_idx = 0

    found = {}
    for count, length in ((64, 320), (16, 2048), (2, 16384)):
        rows = count * length
        q, k, v = (torch.randn(1, n, rows, 128, device="cuda", dtype=torch.bfloat16) for n in (16, 8, 8))
        assert flash_supports(q)
        call = PromptCall(Context("train", (0,), torch.arange(rows, device="cuda")), [length] * count)
        both = [
            _median(lambda c=call, a=(q, k, v): c.attend(Layer, *a, 0.088)),
            _median(lambda c=call, q=q, k=k, v=v: attend_by_tiles(c, Layer, q, k, v, 0.088, None)),
        ]
        found[f"{count}x{length}"] = [round(t, 1) for t in both]
    return found


def find_differing() -> dict[str, list[int]]:
    """Shape -> numbers of rows (of 1 to 320, and some larger) for which the library's BF16 product changes a row."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    found = {}
    for inner, columns in SHAPES:
        generator = torch.Generator("cuda").manual_seed(0)
        weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16, generator=generator)
        x = torch.randn(4096, inner, device="cuda", dtype=torch.bfloat16, generator=generator)
        whole = torch.nn.functional.linear(x, weight)
        tried = [*range(1, 33), *range(40, 321, 8), 513, 1000, 2048]
        found[f"{inner}x{columns}"] = [
            n for n in tried if not torch.equal(torch.nn.functional.linear(x[:n], weight), whole[:n])
        ]
    return found


def find_sizes() -> dict[str, list[int]]:
    """Shape -> sizes of ``library.SIZES`` at which the library's product has not the bits of the plugin's kernel."""
    from miles_true_on_policy.library import compare

    return {
        f"{inner}x{columns}": [
            size for size, same in compare(columns, inner, torch.bfloat16, torch.device("cuda")).items() if not same
        ]
        for inner, columns in SHAPES
    }


def _in_process(variables: dict[str, str]) -> dict[str, list[int]]:
    code = "import json, true_on_policy_kernels as t; print(json.dumps(t.find_differing()))"
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        cwd=here,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found
