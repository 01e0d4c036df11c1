"""The kernels in Triton's interpreter give the reference's bytes, also for ties and for blocks whose scale rounds to zero."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

KERNELS = """
import contextlib
import torch
torch.cuda.device = lambda device: contextlib.nullcontext()
from miles_nvfp4 import kernels
from miles_nvfp4.format import Nvfp4

def same(found, expected, what):
    raw = (t if t.ndim == 0 else t.contiguous().view(torch.uint8) for t in (found, expected))
    assert torch.equal(*raw), what

format, draw = Nvfp4(), torch.Generator().manual_seed(0)
ties = torch.tensor([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, -0.25, -0.75, 6, -6, 0.3, -0.3])
for rows, columns in ((5, 48), (17, 1040)):
    for magnitude in (1, 1e-30, 1e25):
        weight = torch.randn(rows, columns, generator=draw)
        weight[0, :16], weight[1, :32] = ties, torch.randn(32, generator=draw) * 1e-6
        weight[2, :16] = -0.0
        weight *= magnitude
        expected = format.quantize(weight)
        found = {suffix: torch.zeros_like(tensor) for suffix, tensor in expected.items()}
        amax = kernels.largest(weight)
        assert torch.equal(amax, weight.abs().amax())
        kernels.quantize(weight, amax, *found.values())
        for suffix, tensor in expected.items():
            same(found[suffix], tensor, (suffix, magnitude))
        parts = expected["weight"], expected["weight_scale"], expected["weight_scale_2"]
        same(kernels.dequantize(*parts), format.dequantize(expected), "values")
        same(kernels.fake_quantize(weight), format.fake_quantize_activation(weight), "activations")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, whose interpreter runs the kernels here")
def test_kernels_give_the_bytes_of_the_reference():
    ran = subprocess.run(
        [sys.executable, "-c", KERNELS], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
