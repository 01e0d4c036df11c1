import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.data import WeightUnit
from miles_core.plugin import ConfigError, MilesError
from miles_formats import FormatCodec
from miles_mxfp8.format import Mxfp8, power, scale_byte
from miles_mxfp8.layout import CODES, SCALES

#: Magnitudes of E4M3 by code, written from the definition: eight denormals, then 1.m * 2^e.
MAGNITUDES = [Fraction(m, 512) for m in range(8)]
MAGNITUDES += [Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]

GOLDEN_BYTES = {448: 127, 449: 128, 512: 128, 1.0: 119, 1.75: 119, 1.875: 120, 240: 127, 0: 0}


def quantize(weight):
    parts = Mxfp8().quantize(weight)
    return parts[CODES], parts[SCALES]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exponent_of(amax):
    """The smallest e with 2^e >= amax / 448, over the rationals."""
    e = -160
    while Fraction(2) ** e < Fraction(amax) / 448:
        e += 1
    return e


def nearest_even(x):
    """The signed E4M3 value nearest to a rational |x| <= 448, ties to the even code."""
    best = min(range(len(MAGNITUDES)), key=lambda code: (abs(MAGNITUDES[code] - abs(x)), code % 2))
    return MAGNITUDES[best] if x >= 0 else -MAGNITUDES[best]


@pytest.mark.parametrize(("amax", "byte"), GOLDEN_BYTES.items())
def test_golden_scale_bytes(amax, byte):
    weight = torch.zeros(1, 32)
    weight[0, 7] = -amax
    assert quantize(weight)[1].tolist() == [[byte]]


def test_golden_codes():
    values = [448.0, -448.0, 224.0, 17.0, 19.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, -0.0]
    codes, scale = quantize(torch.tensor([values + [0.0] * 23]))
    assert scale.tolist() == [[127]]
    expected = [0x7E, 0xFE, 0x76, 0x58, 0x5A, 0x01, 0x00, 0x02, 0x80]
    assert codes.view(torch.uint8)[0].tolist() == expected + [0] * 23


def test_a_scale_byte_is_a_power_of_two_or_nan():
    every = power(torch.arange(256, dtype=torch.uint8)).double()
    assert every[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert every[255].isnan()
    assert torch.equal(every[:255].float(), torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu).float())


@pytest.mark.parametrize("k", [-126, -100, -1, 0, 5, 118])
def test_the_exponent_changes_exactly_above_448_times_a_power_of_two(k):
    at = torch.tensor(448.0 * 2.0**k)
    above = torch.nextafter(at, torch.tensor(math.inf))
    assert scale_byte(torch.stack([at, above])).tolist() == [k + 127, k + 128]


def test_a_block_of_zeros_has_byte_and_codes_zero():
    weight = normal(2, 64)
    weight[1, 32:] = 0
    codes, scale = quantize(weight)
    assert scale[1, 1] == 0 and not codes[1, 32:].view(torch.uint8).any()
    assert not Mxfp8().dequantize({CODES: codes, SCALES: scale})[1, 32:].any()


def test_denormals_keep_their_scale_in_range():
    smallest = 2.0**-149
    codes, scale = quantize(torch.tensor([[smallest, 3 * smallest, -(2.0**-136)] + [0.0] * 29]))
    assert scale.tolist() == [[0]]  # 2^-127 is the smallest scale there is
    assert codes.float()[0, :3].tolist() == [0, 0, -(2.0**-9)]


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=32),
)
@settings(max_examples=300)
def test_codes_and_scales_are_those_of_the_rule_in_rational_arithmetic(values):
    weight = torch.tensor([values + [0.0] * (32 - len(values))])
    codes, scale = quantize(weight)
    amax = max(map(abs, values))
    byte = 0 if amax == 0 else max(0, exponent_of(amax) + 127)
    assert scale.tolist() == [[byte]]
    for code, value in zip(codes[0].float().tolist(), weight[0].tolist(), strict=True):
        assert Fraction(code) == nearest_even(Fraction(value) / Fraction(2) ** (byte - 127))


@given(st.integers(0, 2**32 - 1), st.floats(2.0**-80, 2.0**80))
@settings(max_examples=50)
def test_the_dequantised_is_a_fixed_point_and_exact_in_bf16(seed, magnitude):
    format = Mxfp8()
    values = format.dequantize(format.quantize(normal(8, 96, seed=seed) * magnitude))
    assert torch.equal(values.bfloat16().float(), values)
    assert torch.equal(format.dequantize(format.quantize(values)), values)


def test_codes_may_change_where_a_block_maximum_rounded_down():
    weight = torch.zeros(1, 32)
    weight[0, 0] = 225.0  # byte 127 and code 224, whose own exponent is one less
    format = Mxfp8()
    once = format.quantize(weight)
    twice = format.quantize(format.dequantize(once))
    assert (once[SCALES].item(), twice[SCALES].item()) == (127, 126)
    assert not format.exact


def test_the_error_band():
    weight = normal(2048, 1024)
    format = Mxfp8()
    error = float((format.dequantize(format.quantize(weight)) - weight).norm() / weight.norm())
    assert error == pytest.approx(0.0266, abs=0.0003)


def test_bytes_a_weight():
    assert Mxfp8().nbytes((1024, 2048)) * 8 == 8.25 * 1024 * 2048


@pytest.mark.parametrize(("columns", "near"), [(100, "96 or 128"), (16, "32")])
def test_k_that_32_does_not_divide_is_refused_with_name_shape_and_sizes(columns, near):
    unit = WeightUnit({"model.layers.3.mlp.up_proj.weight": torch.ones(4, columns)})
    with pytest.raises(ConfigError, match=rf"layers\.3\.mlp\.up_proj\.weight \[4, {columns}\] .* of 32: {near}, not"):
        FormatCodec(Mxfp8()).encode_unit(unit)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named(bad):
    weight = torch.zeros(4, 32)
    weight[1, 2] = bad
    with pytest.raises(MilesError, match=r"layers\.3\.mlp\.up_proj\.weight holds 1 values .* at \[1, 2\]"):
        FormatCodec(Mxfp8()).encode_unit(WeightUnit({"model.layers.3.mlp.up_proj.weight": weight}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_follow_the_same_rule_along_k(dtype):
    format = Mxfp8()
    x = normal(2, 5, 64).to(dtype)
    found = format.fake_quantize_activation(x)
    assert found.dtype == dtype and found.shape == x.shape
    for token in range(5):  # one by one: nothing depends on the batch
        alone = format.dequantize(format.quantize(x[1, token : token + 1]))
        assert torch.equal(found[1, token].float(), alone[0])  # exact in bf16 as well


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_activation_block_that_is_not_finite_becomes_nan_and_stays_in_its_block(bad):
    x = normal(2, 64)
    clean = Mxfp8().fake_quantize_activation(x)
    x[0, 3] = bad
    found = Mxfp8().fake_quantize_activation(x)
    assert found[0, :32].isnan().all()
    assert torch.equal(found[0, 32:], clean[0, 32:]) and torch.equal(found[1], clean[1])


def test_config_block():
    assert Mxfp8().config(["lm_head"]) == {
        "quant_method": "mxfp8",
        "fmt": "e4m3",
        "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    assert Mxfp8().files([]) == {}


def test_torchao_rounds_scales_up_to_the_same_bytes_and_gets_the_same_codes():
    """Its RCEIL is an oracle for BF16 inputs with block maxima from 2^-117."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao (extra: test)")
    weight = torch.cat([normal(64, 256, seed=s) * 2.0**k for s, k in enumerate((-90, -7, 0, 40))]).bfloat16()
    weight[3, :32] = 0
    scale, codes = mx.to_mx(weight, torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.RCEIL)
    ours = Mxfp8().quantize(weight)
    assert torch.equal(scale.view(torch.uint8).reshape(ours[SCALES].shape), ours[SCALES])
    assert torch.equal(codes.view(torch.uint8).reshape(weight.shape), ours[CODES].view(torch.uint8))
