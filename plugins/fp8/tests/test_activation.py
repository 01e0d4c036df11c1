"""Activations: the rule of the weights in blocks of 1 x 128 along K."""

import math

import numpy as np
import pytest
import torch

from miles_fp8.format import Fp8


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("columns", [128, 384, 200, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_block_is_quantised_by_the_rule_of_a_weight_tile(columns, dtype):
    x = normal(2, 3, columns).to(dtype)
    found = Fp8().fake_quantize_activation(x)
    assert found.dtype == dtype and found.shape == x.shape
    for token, quantized in zip(x.reshape(-1, columns), found.reshape(-1, columns), strict=True):
        for start in range(0, columns, 128):
            block = token[start : start + 128].float().numpy()
            scale = np.maximum(np.abs(block).max(), np.float32(1e-10)) / np.float32(448)
            codes = torch.from_numpy(block / scale).to(torch.float8_e4m3fn).float().numpy()
            assert torch.equal(quantized[start : start + 128], torch.from_numpy(codes * scale).to(dtype))


def test_power_of_two_scales_hold_for_activations_too():
    x = normal(4, 256)
    found = Fp8(power_of_two_scales=True).fake_quantize_activation(x)
    assert torch.equal(found.bfloat16().float(), found)  # four bits times a power of two
    assert not torch.equal(found, Fp8().fake_quantize_activation(x))


def test_the_error_band():
    x = normal(2048, 1024)
    assert float((Fp8().fake_quantize_activation(x) - x).norm() / x.norm()) == pytest.approx(0.0257, abs=0.0003)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_becomes_nan_and_stays_in_its_block(power_of_two, bad):
    format, x = Fp8(power_of_two), normal(2, 256)
    clean = format.fake_quantize_activation(x)
    x[0, 3] = bad
    found = format.fake_quantize_activation(x)
    assert found[0, :128].isnan().all()
    assert torch.equal(found[0, 128:], clean[0, 128:]) and torch.equal(found[1], clean[1])
