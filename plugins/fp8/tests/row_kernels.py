"""Kernels that compute rows and their codes, compared with a launch for the codes; on a GPU, or in Triton's interpreter where this file is run."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def compare(compute, shape, power_of_two):
    """Compare ``compute(epilogue)`` with and without an epilogue for rows of ``shape``: equal rows, and the codes and scales of a launch."""
    from miles_fp8 import kernels
    from miles_fp8.row_cache import QuantizedRowCache
    from miles_fp8.row_codes import RowCodes

    kept, expected = QuantizedRowCache(), compute(None)
    found = compute(RowCodes(shape, expected.device, power_of_two, kept, 1))
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), shape
    rows = found.reshape(shape)
    codes = kept.take(rows)
    assert codes is not None and kept.take(rows) is None
    for mine, other in zip(codes, kernels.activation_codes(rows, power_of_two), strict=True):
        assert mine.stride() == other.stride()
        assert torch.equal(mine.t().contiguous().view(torch.uint8), other.t().contiguous().view(torch.uint8)), shape


def compare_norm(rows, dim, power_of_two):
    from miles_embedded.kernels.norm import rms_norm

    x, weight = normal(1, rows, dim), normal(dim, seed=1)
    x[0, 0, 3:9] = 0.0
    x[0, rows // 2] *= 1e4
    if rows > 2:
        x[0, 2] = 0.0
        x[0, 1, 5] = torch.nan
    compare(lambda epilogue: rms_norm(x, weight, 1e-6, epilogue), (rows, dim), power_of_two)
    other = normal(1, rows, dim, seed=8)
    compare(lambda epilogue: rms_norm.of_sum(x, other, weight, 1e-6, epilogue)[1], (rows, dim), power_of_two)


def compare_gate(rows, width, power_of_two):
    from miles_embedded.kernels.swiglu import swiglu

    both = normal(1, rows, 2 * width, seed=2)
    both[0, rows - 1, 1] = torch.inf
    gate, up = both.chunk(2, -1)
    compare(lambda epilogue: swiglu(gate, up, epilogue), (rows, width), power_of_two)


def compare_attention(rows, heads, dim, power_of_two):
    from miles_embedded.engine.attention_kernel import attend_rows

    own = [normal(rows, 2, 8, dim, seed=i) for i in (3, 4)]
    prompts = [normal(2, 2, 300, dim, seed=i) for i in (5, 6)]
    slots = torch.arange(rows, device=DEVICE) % 2
    lengths = {"prompt_slots": slots, "prompt_lengths": 140 + 100 * slots, "lengths": slots + 3}
    call, q = SimpleNamespace(queries=1, longest=308, **lengths), normal(rows, heads, dim, seed=7)
    keys, values = zip(prompts, own, strict=True)
    compare(lambda e: attend_rows(q, keys, values, call, dim**-0.5, None, e), (rows, heads * dim), power_of_two)


def patch_interpreter():
    """Let arrays of one element be indices: Triton 3.6 turns them into numbers, which NumPy 2.4 refuses."""
    import numpy as np
    import triton.runtime.interpreter as interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, *args):
        patch(tensor, *args)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    patch_interpreter()
    torch.cuda.device = lambda device: contextlib.nullcontext()
    for power_of_two in (False, True):
        for rows, dim in ((17, 144), (18, 64), (3, 1536), (5, 16)):
            compare_norm(rows, dim, power_of_two)
        for rows, width in ((6, 1100), (17, 128), (3, 1040)):
            compare_gate(rows, width, power_of_two)
        compare_attention(4, 4, 128, power_of_two)
