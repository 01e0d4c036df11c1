"""The kernel that encodes several weights, in Triton's interpreter, against the one of a single weight."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

KERNEL = """
import contextlib
import torch
torch.cuda.device = lambda device: contextlib.nullcontext()
from miles_fp8 import kernels
joined = torch.randn(3, 400, 300, dtype=torch.bfloat16)
joined[1, 130, 7] = torch.nan
for power_of_two in (False, True):
    for weights in ([each[:200] for each in joined], [each[200:] for each in joined], [joined[0].t().float()]):
        rows, columns = weights[0].shape
        def room():
            codes = [torch.zeros(rows, columns, dtype=torch.float8_e4m3fn) for _ in weights]
            return codes, [torch.zeros(-(-rows // 128), -(-columns // 128)) for _ in weights]
        (codes, scales), (alone, own) = room(), room()
        kernels.quantize_alike(weights, codes, scales, power_of_two)
        for weight, *parts in zip(weights, alone, own):
            kernels.quantize(weight, *parts, power_of_two)
        for one, other in zip(codes + scales, alone + own):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        assert all(torch.equal(s.isfinite().all(), w.isfinite().all()) for s, w in zip(scales, weights))
        before = [each.clone() for each in weights]
        for kernels.MOST in (1 << 15, 2):
            launches = kernels.prepare_alike(weights, codes, scales, power_of_two)
            assert len(launches) == -(-len(weights) // kernels.MOST)
            for weight, *parts in zip(weights, alone, own):
                weight.mul_(-3)
                kernels.quantize(weight, *parts, power_of_two)
            for launch in launches:
                launch()
            for one, other in zip(codes + scales, alone + own):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for each, value in zip(weights, before):
            each.copy_(value)
        values = torch.zeros(len(weights), 2 * rows, columns)
        kernels.dequantize_alike(codes, scales, [each[:rows] for each in values])
        for each, code, scale in zip(values, codes, scales):
            torch.testing.assert_close(each[:rows], kernels.dequantize(code, scale), rtol=0, atol=0, equal_nan=True)
            assert not each[rows:].any()
    for stack in (joined[:, :200], joined[:, 200:], joined.transpose(1, 2)):
        count, rows, columns = stack.shape
        out = torch.zeros(count, 2 * rows, columns)  # the interpreter truncates to bfloat16, a GPU rounds
        found = kernels.fake_quantize_weights(stack, out[:, :rows], power_of_two)
        for weight, value, scale in zip(stack, out, found):
            codes, own = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), torch.zeros_like(scale)
            kernels.quantize(weight, codes, own, power_of_two)
            expected = kernels.dequantize(codes, own)
            torch.testing.assert_close(value[:rows], expected, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(scale, own, rtol=0, atol=0, equal_nan=True)
        assert not out[:, rows:].any()
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, whose interpreter runs the kernel here")
def test_weights_in_one_launch_get_the_bytes_they_get_alone():
    ran = subprocess.run(
        [sys.executable, "-c", KERNEL], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
