"""The kernels' scales; that they run, and give the reference's bytes, are FormatContract's tests."""

import pytest
import torch

from miles_mxfp8.format import Mxfp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_scale_of_every_exponent_and_of_the_values_around_448():
    powers = torch.ldexp(torch.ones(277), torch.arange(-149, 128)).repeat_interleave(3).reshape(-1, 3)
    amax = (powers * torch.tensor([1.0, 1.75, 1.7500002])).flatten()
    weight = torch.zeros(len(amax), 32)
    weight[:, 7] = amax
    weight = weight[weight.isfinite().all(1)]
    found, expected = Mxfp8().quantize(weight.cuda()), Mxfp8().quantize(weight)
    for suffix, tensor in expected.items():
        assert torch.equal(found[suffix].cpu().view(torch.uint8), tensor.view(torch.uint8)), suffix
