"""The kernels in Triton's interpreter give the reference's bytes, also for quotients at and next to the middle of two codes."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

KERNELS = """
import contextlib
import torch
torch.cuda.device = lambda device: contextlib.nullcontext()
from miles_int4 import kernels
from miles_int4.format import Int4

draw = torch.Generator().manual_seed(0)
def check(weight, size):
    format = Int4(size)
    expected = format.quantize(weight)
    found = {suffix: torch.zeros_like(tensor) for suffix, tensor in expected.items()}
    kernels.quantize(weight, *found.values(), size)
    for suffix, tensor in expected.items():
        assert torch.equal(found[suffix], tensor), (suffix, size)
    values = kernels.dequantize(expected["weight_packed"], expected["weight_scale"])
    assert torch.equal(values, format.dequantize(expected)), size

for size, shape in ((8, (5, 48)), (32, (9, 544)), (128, (10, 1280)), (1024, (3, 2048))):
    for magnitude in (1, 1e-6, 1e-33, 1e-39, 1e30):
        check(torch.randn(shape, generator=draw) * magnitude, size)
scale = (torch.rand(64, generator=draw) + 1e-5).bfloat16().float()
middles = [scale * (k + 0.5) for k in range(7)]
sides = [torch.nextafter(m, torch.tensor(end)) for m in middles for end in (9.0, -9.0)]
columns = [*middles, *sides, *(-m for m in middles), *(-s for s in sides), scale * 7]
columns += [torch.rand(64, generator=draw) * scale * 7 for _ in range(64 - len(columns))]
check(torch.stack(columns, 1).contiguous(), 64)
for size in (24, 40):
    expected = Int4(size).quantize(torch.randn(4, 20 * size, generator=draw))
    values = kernels.dequantize(expected["weight_packed"], expected["weight_scale"])
    assert torch.equal(values, Int4(size).dequantize(expected)), size
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, whose interpreter runs the kernels here")
def test_kernels_give_the_bytes_of_the_reference():
    ran = subprocess.run(
        [sys.executable, "-c", KERNELS], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
