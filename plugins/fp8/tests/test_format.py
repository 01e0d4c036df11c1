import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.data import WeightUnit
from miles_core.plugin import MilesError
from miles_formats import FormatCodec
from miles_fp8.format import Fp8, round_up_to_power_of_two
from miles_fp8.layout import CODES, SCALES

E4M3 = sorted(
    {m * 2.0**-9 for m in range(8)} | {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)} - {480.0}
)


def quantize(weight, **options):
    parts = Fp8(**options).quantize(weight)
    return parts[CODES], parts[SCALES]


def nearest_even(x):
    """The E4M3 magnitude nearest to |x| <= 448 in real arithmetic, ties to the even code; the sign of x."""
    best = min(range(len(E4M3)), key=lambda i: (abs(E4M3[i] - abs(x)), i % 2))
    return math.copysign(E4M3[best], x)


def test_sizes_that_transformers_does_not_load_are_told():
    assert Fp8().caution((256, 128)) is None
    assert "multiples of 128" in Fp8().caution((576, 128)) and "multiples of 128" in Fp8().caution((128, 576))


def test_the_table_of_magnitudes_is_torchs():
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    assert every == E4M3 and E4M3[-1] == 448


def test_golden_codes():
    weight = torch.tensor([[448.0, -448.0, 224.0, 1.0, 17.0, 19.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 0.0]])
    codes, scales = quantize(weight)
    assert scales.tolist() == [[1.0]]
    # 17 and 19 lie half-way between multiples of 2 and go to the even code; 2^-10 is half of the smallest number
    assert codes.float().tolist() == [[448, -448, 224, 1, 16, 20, 2.0**-9, 0, 2.0**-8, 0]]
    assert codes.view(torch.uint8).tolist() == [[0x7E, 0xFE, 0x76, 0x38, 0x58, 0x5A, 0x01, 0x00, 0x02, 0x00]]


def test_the_scale_is_a_division_in_fp32():
    amax = torch.rand(1, 1000, generator=torch.Generator().manual_seed(0)) + 0.1
    weight = torch.zeros(128, 128 * 1000)
    weight[5, 64::128] = amax
    expected = amax.numpy() / np.float32(448)
    assert np.array_equal(quantize(weight)[1].numpy(), expected)


def test_division_is_not_multiplication_by_the_reciprocal():
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    codes, scales = quantize(weight)
    scale = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert np.array_equal(
        codes.float().numpy(), torch.from_numpy(weight.numpy() / scale.numpy()).to(codes.dtype).float()
    )
    other = (weight * (1 / scale)).clamp(-448, 448).to(codes.dtype)
    differing = float((codes.view(torch.uint8) != other.view(torch.uint8)).float().mean())
    assert 0.0003 < differing < 0.0008  # 0.049 % of BF16 inputs


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_tile_of_zeros(power_of_two):
    codes, scales = quantize(torch.zeros(128, 256), power_of_two_scales=power_of_two)
    assert not codes.view(torch.uint8).any()
    if not power_of_two:
        assert torch.equal(scales, torch.full((1, 2), np.float32(1e-10) / np.float32(448)))


def test_the_ragged_edge_has_scales_of_its_own():
    weight = torch.ones(130, 300)
    weight[128:, 256:] = 448.0
    codes, scales = quantize(weight)
    assert codes.shape == (130, 300) and scales.shape == (2, 3)
    assert scales[1, 2] == 1 and scales[0, 0] == np.float32(1) / np.float32(448)
    assert torch.equal(Fp8().dequantize({CODES: codes, SCALES: scales})[128:, 256:], weight[128:, 256:])


def test_the_error_band():
    weight = torch.randn(2048, 4096, generator=torch.Generator().manual_seed(0))
    format = Fp8()
    error = float((format.dequantize(format.quantize(weight)) - weight).norm() / weight.norm())
    assert error == pytest.approx(0.0265, abs=0.0003)


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    power_of_two=st.booleans(),
)
@settings(max_examples=200)
def test_codes_are_those_of_the_formula_in_real_arithmetic(values, power_of_two):
    weight = torch.tensor([values])
    codes, scales = quantize(weight, power_of_two_scales=power_of_two)
    scale = float(scales)
    smallest = np.float32(max(np.float32(max(map(abs, values))), np.float32(1e-10))) / np.float32(448)
    if power_of_two:
        assert math.frexp(scale)[0] == 0.5 and scale / 2 < smallest <= scale
    else:
        assert scale == smallest
    for code, value in zip(codes[0].float().tolist(), weight[0].tolist(), strict=True):
        ratio = float(np.float32(np.float64(value) / np.float64(scale)))  # one rounding, like FP32 division
        assert code == nearest_even(max(-448.0, min(448.0, ratio)))


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.integers(1, 300), st.floats(1e-20, 1e20))
@settings(max_examples=50)
def test_quantising_the_dequantised_gives_the_same_bytes(seed, rows, columns, magnitude):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * magnitude
    format = Fp8()
    once = format.quantize(weight)
    twice = format.quantize(format.dequantize(once))
    assert torch.equal(once[SCALES], twice[SCALES])
    assert torch.equal(once[CODES].view(torch.uint8), twice[CODES].view(torch.uint8))


def test_power_of_two_scales_survive_bf16():
    format = Fp8(power_of_two_scales=True)
    values = format.dequantize(format.quantize(torch.randn(256, 256, generator=torch.Generator().manual_seed(0))))
    assert torch.equal(values.bfloat16().float(), values)
    assert torch.equal(format.dequantize(format.quantize(values)), values)


@pytest.mark.parametrize("k", [-40, -3, 0, 7, 100])
def test_rounding_up_right_above_and_at_a_power_of_two(k):
    exact = np.float32(2.0**k)
    above, below = np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))
    found = round_up_to_power_of_two(torch.tensor([below, exact, above]))
    assert found.tolist() == [2.0**k, 2.0**k, 2.0 ** (k + 1)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named(bad):
    weight = torch.zeros(4, 4)
    weight[1, 2] = bad
    with pytest.raises(MilesError, match=r"layers\.3\.mlp\.up_proj\.weight holds 1 values .* at \[1, 2\]"):
        FormatCodec(Fp8()).encode_unit(WeightUnit({"model.layers.3.mlp.up_proj.weight": weight}))


def test_config_block():
    assert Fp8().config(["lm_head"]) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    assert Fp8(power_of_two_scales=True).config([])["scale_fmt"] == "ue8m0"
