"""Blocks of codes as BF16 numbers, to the bit."""

from types import SimpleNamespace

import pytest
import torch

from miles_megatron.trainer.dequantised import dequantise_in_two_passes


class Cast:
    """What is used of TransformerEngine's function."""

    @staticmethod
    def forward(ctx, tensor, dtype=None):
        return "its own"


dequantise_in_two_passes(Cast)
dequantise_in_two_passes(Cast)  # of a second trainer in the process


def dequantised(codes, scales, wide=False, dtype=torch.bfloat16):
    data = None if codes is None else codes.view(torch.uint8)
    return Cast.forward(
        None, SimpleNamespace(_rowwise_data=data, _rowwise_scale_inv=scales, _is_2D_scaled=wide, _dtype=dtype)
    )


def codes(*shape):
    torch.manual_seed(0)
    return torch.randn(shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("rows", [200, (2, 50)])
def test_a_scale_for_128_neighbours(rows):
    q = codes(*((rows,) if isinstance(rows, int) else rows), 256)
    count = q.numel() // 256
    scales = torch.rand(2, count + 4)  # padded, and its columns are the rows
    found = dequantised(q, scales)
    wide = q.float().view(count, 2, 128) * scales[:, :count].t()[:, :, None]
    assert torch.equal(found, wide.bfloat16().view(q.shape))


def test_a_scale_for_a_block():
    q, scales = codes(256, 384), torch.rand(2, 4)
    found = dequantised(q, scales, wide=True)
    wide = q.float() * scales[:, :3].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(found, wide.bfloat16())


@pytest.mark.parametrize(
    ("codes", "wide", "dtype"),
    [
        (None, False, torch.bfloat16),
        (codes(128, 100), False, torch.bfloat16),
        (codes(100, 128), True, torch.bfloat16),
        (codes(128, 128), False, torch.float32),
    ],
)
def test_other_forms_are_left_to_transformer_engine(codes, wide, dtype):
    assert dequantised(codes, torch.ones(1, 128), wide, dtype) == "its own"
