"""The kernels are what runs on a GPU; that they give the reference's bytes is FormatContract's test."""

import pytest
import torch

from miles_core.precision.gpu_kernel import reference_only
from miles_mxfp8.format import Mxfp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Called(Exception):
    pass


def called(*args, **kwargs):
    raise Called


def test_a_gpu_runs_the_kernels(monkeypatch):
    from miles_mxfp8 import kernels

    monkeypatch.setattr(kernels, "quantize", called)
    monkeypatch.setattr(kernels, "fake_quantize", called)
    format, weight = Mxfp8(), torch.ones(3, 96, device="cuda")
    for act in (format.quantize, format.fake_quantize_activation):
        with pytest.raises(Called):
            act(weight)
        with reference_only():
            act(weight)


def test_the_scale_of_every_exponent_and_of_the_values_around_448():
    powers = torch.ldexp(torch.ones(277), torch.arange(-149, 128)).repeat_interleave(3).reshape(-1, 3)
    amax = (powers * torch.tensor([1.0, 1.75, 1.7500002])).flatten()
    weight = torch.zeros(len(amax), 32)
    weight[:, 7] = amax
    weight = weight[weight.isfinite().all(1)]
    found, expected = Mxfp8().quantize(weight.cuda()), Mxfp8().quantize(weight)
    for suffix, tensor in expected.items():
        assert torch.equal(found[suffix].cpu().view(torch.uint8), tensor.view(torch.uint8)), suffix
