"""Which groups have a kernel; that they give the reference's bytes is FormatContract's test."""

import pytest
import torch

from miles_int4.format import Int4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def called(*args, **kwargs):
    raise AssertionError("a kernel ran")


@pytest.mark.parametrize("size", [8, 32, 128, 1024])
def test_every_power_of_two_has_a_kernel(monkeypatch, size):
    from miles_int4 import kernels

    format, weight = Int4(size), torch.randn(5, 2048, device="cuda")
    found, expected = format.quantize(weight), format.quantize(weight.cpu())
    assert all(torch.equal(found[suffix].cpu(), tensor) for suffix, tensor in expected.items())
    monkeypatch.setattr(kernels, "quantize", called)
    with pytest.raises(AssertionError, match="a kernel ran"):
        format.quantize(weight)


@pytest.mark.parametrize("size", [24, 40, 8192])
def test_other_group_sizes_run_the_reference(monkeypatch, size):
    from miles_int4 import kernels

    monkeypatch.setattr(kernels, "quantize", called)
    weight = torch.randn(2, size * 2)
    found, expected = Int4(size).quantize(weight.cuda()), Int4(size).quantize(weight)
    assert all(torch.equal(found[suffix].cpu(), tensor) for suffix, tensor in expected.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [24, 32, 128])
def test_stacked_codes_are_decoded_into_a_tensor_with_the_bits_of_the_reference(monkeypatch, size, dtype):
    """Three matrices in one launch; their values are rounded once, also next to the last column of a tile."""
    from miles_int4 import kernels

    format = Int4(size)
    weights = torch.randn(3, 7, 5 * size * 8, generator=torch.Generator().manual_seed(size))
    parts = [format.quantize(weight) for weight in weights]
    expected = torch.stack([format.dequantize(each) for each in parts]).to(dtype)
    stacked = {suffix: torch.stack([each[suffix] for each in parts]).cuda() for suffix in parts[0]}
    out = torch.full(expected.shape, torch.nan, dtype=dtype, device="cuda")
    format.dequantize_stacked(stacked, out)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(out.cpu().view(bits), expected.view(bits))
    monkeypatch.setattr(kernels, "dequantize", called)
    with pytest.raises(AssertionError, match="a kernel ran"):
        format.dequantize_stacked(stacked, out)
