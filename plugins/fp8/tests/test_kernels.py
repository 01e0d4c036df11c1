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


@pytest.mark.parametrize("power_of_two", [False, True])
def test_quotients_are_those_of_a_division_for_every_number_of_bfloat16(power_of_two):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    tiles = []
    for exponent in (1, 85, 97, 120, 127, 187, 254):  # from the smallest normal number to the largest
        for mantissa in range(0, 128, 5):
            largest = torch.tensor(exponent << 7 | mantissa, dtype=torch.int16).view(torch.bfloat16).float()
            below = torch.where(every.abs() <= largest, every, largest)
            below[:: 128 * 128] = largest  # in each of the four tiles
            tiles.append(below.bfloat16().view(512, 128))
    weight, format = torch.cat(tiles), Fp8(power_of_two_scales=power_of_two)
    found, expected = format.quantize(weight.cuda()), format.quantize(weight)
    for suffix, tensor in expected.items():
        assert torch.equal(found[suffix].cpu().view(torch.uint8), tensor.view(torch.uint8)), suffix
