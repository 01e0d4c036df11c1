"""The kernels are what runs on a GPU; that they give the reference's bytes is FormatContract's test."""

import pytest
import torch

from miles_core.precision.gpu_kernel import reference_only
from miles_fp8.format import Fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Called(Exception):
    pass


def called(*args, **kwargs):
    raise Called


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_gpu_runs_the_kernels(monkeypatch, power_of_two):
    from miles_fp8 import kernels

    monkeypatch.setattr(kernels, "quantize", called)
    monkeypatch.setattr(kernels, "fake_quantize", called)
    format, weight = Fp8(power_of_two), torch.ones(130, 200, device="cuda")
    for act in (format.quantize, format.fake_quantize_activation):
        with pytest.raises(Called):
            act(weight)
        with reference_only():
            act(weight)


def test_ragged_edges_of_both_sides():
    format = Fp8()
    for rows, columns in ((1, 1), (127, 129), (300, 1000), (128, 5)):
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
        found, expected = format.quantize(weight.cuda()), format.quantize(weight)
        for suffix, tensor in expected.items():
            assert torch.equal(found[suffix].cpu().view(torch.uint8), tensor.view(torch.uint8)), (rows, columns)
        x = format.fake_quantize_activation(weight.bfloat16().cuda()).cpu()
        assert torch.equal(x, format.fake_quantize_activation(weight.bfloat16()))
