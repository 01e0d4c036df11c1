"""The kernels at ragged edges; that they run, and give the reference's bytes, are FormatContract's tests."""

import pytest
import torch

from miles_fp8.format import Fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_ragged_edges_of_both_sides():
    format = Fp8()
    for rows, columns in ((1, 1), (127, 129), (300, 1000), (128, 5)):
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
        found, expected = format.quantize(weight.cuda()), format.quantize(weight)
        for suffix, tensor in expected.items():
            assert torch.equal(found[suffix].cpu().view(torch.uint8), tensor.view(torch.uint8)), (rows, columns)
        x = format.fake_quantize_activation(weight.bfloat16().cuda()).cpu()
        assert torch.equal(x, format.fake_quantize_activation(weight.bfloat16()))
