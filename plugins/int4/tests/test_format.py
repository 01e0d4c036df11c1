import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.data import WeightUnit
from miles_core.plugin import ConfigError, MilesError
from miles_formats import FormatCodec
from miles_int4.format import CODES, SCALES, SHAPE, Int4, pack, unpack

NAME = "model.layers.3.mlp.experts.0.up_proj.weight"


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codes_of(parts):
    """Codes from the packed words, by arithmetic on Python integers."""
    words = [[word % 2**32 for word in row] for row in parts[CODES].tolist()]
    return [[word // 16**i % 16 - 8 for word in row for i in range(8)] for row in words]


def bf16_of(x):
    """A positive rational rounded to BF16 (8 bits of significand), ties to even."""
    exponent = math.floor(math.log2(x))
    while Fraction(2) ** exponent > x:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= x:
        exponent += 1
    step = Fraction(2) ** (max(exponent, -126) - 7)
    return round(x / step) * step  # Python rounds halves to even


def fp32_of(x):
    """A rational rounded to FP32, by the same rule with 24 bits."""
    if x == 0:
        return Fraction(0)
    exponent = math.frexp(float(abs(x)))[1] - 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return round(x / step) * step


def test_golden_rounding():
    weight = torch.tensor([[7.0, 0.5, 1.5, -2.5, 6.6, -0.4, -7.0, 3.5]])
    parts = Int4(group_size=8).quantize(weight)
    assert parts[SCALES].tolist() == [[1.0]]
    assert codes_of(parts) == [[7, 0, 2, -2, 7, 0, -7, 4]]
    assert parts[SHAPE].tolist() == [1, 8]


def test_eight_zeros_pack_to_0x88888888():
    parts = Int4(group_size=8).quantize(torch.zeros(1, 8))
    assert parts[CODES].tolist() == [[0x88888888 - 2**32]]
    assert parts[SCALES].item() == torch.tensor(1e-5).bfloat16().item()
    assert not Int4(group_size=8).dequantize(parts).any()


def test_index_zero_is_in_the_lowest_bits():
    codes = torch.tensor([[-7, -6, -5, -4, 4, 5, 6, 7]])
    assert pack(codes).tolist() == [[0xFEDC4321 - 2**32]]
    assert unpack(pack(codes)).tolist() == codes.tolist()


def test_the_scale_is_the_stored_one():
    weight = normal(4, 256)
    parts = Int4().quantize(weight)
    unrounded = weight.reshape(4, 2, 128).abs().amax(-1).numpy() / 7
    assert parts[SCALES].dtype == torch.bfloat16
    assert parts[SCALES].float().tolist() != unrounded.tolist()
    expected = torch.div(weight.reshape(4, 2, 128), parts[SCALES].float()[..., None]).round().clamp(-7, 7)
    assert codes_of(parts) == expected.reshape(4, 256).int().tolist()


def test_a_trainer_with_an_fp32_scale_would_not_match():
    weight = normal(64, 256).reshape(64, 2, 128)
    scale = (weight.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-5)
    theirs = (weight / scale).round().clamp(-7, 7) * scale
    ours = Int4().dequantize(Int4().quantize(weight.reshape(64, 256))).reshape(64, 2, 128)
    assert float((ours != theirs).double().mean()) > 0.5


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=8, max_size=8),
    st.sampled_from([2, 4, 8]),
)
@settings(max_examples=300)
def test_codes_and_scales_are_those_of_the_rule_in_rational_arithmetic(values, group):
    parts = Int4(group_size=group).quantize(torch.tensor([values]))
    codes = codes_of(parts)[0]
    for index, scale in enumerate(parts[SCALES][0].tolist()):
        members = [Fraction(v) for v in values[index * group : (index + 1) * group]]
        floor = Fraction(torch.tensor(1e-5).item())
        assert Fraction(scale) == bf16_of(max(fp32_of(max(map(abs, members)) / 7), floor))
        for value, code in zip(members, codes[index * group :], strict=False):
            assert code == max(-7, min(7, round(fp32_of(value / Fraction(scale)))))


@given(st.integers(0, 2**32 - 1), st.sampled_from([16, 32, 128]), st.floats(2.0**-40, 2.0**40))
@settings(max_examples=50)
def test_quantising_the_dequantised_gives_the_same_bytes(seed, group, magnitude):
    format = Int4(group_size=group)
    once = format.quantize(normal(6, 256, seed=seed) * magnitude)
    twice = format.quantize(format.dequantize(once))
    assert all(torch.equal(once[suffix], twice[suffix]) for suffix in once)


def test_negating_weights_negates_codes():
    weight = normal(8, 256)
    plus, minus = codes_of(Int4().quantize(weight)), codes_of(Int4().quantize(-weight))
    assert minus == [[-code for code in row] for row in plus]
    assert {abs(code) for row in plus for code in row} == set(range(8))


@pytest.mark.parametrize(("group", "band"), [(32, 0.0970), (128, 0.1173)])
def test_the_error_bands(group, band):
    weight = normal(2048, 1024)
    format = Int4(group_size=group)
    error = float((format.dequantize(format.quantize(weight)) - weight).norm() / weight.norm())
    assert error == pytest.approx(band, abs=0.0005)


@pytest.mark.parametrize("group", [256, 1024])
def test_large_groups_stay_within_the_declared_error(group):
    weight = normal(512, 1024)
    format = Int4(group_size=group)
    assert float((format.dequantize(format.quantize(weight)) - weight).norm() / weight.norm()) < format.error


def test_group_sizes_are_part_of_the_format():
    weight = normal(1024, 1024)
    fine, coarse = (f.dequantize(f.quantize(weight)) for f in (Int4(group_size=32), Int4(group_size=128)))
    assert float((fine - coarse).norm() / coarse.norm()) == pytest.approx(0.122, abs=0.003)


@pytest.mark.parametrize(("group", "times"), [(32, 16 / 4.5), (64, 3.76), (128, 3.88)])
def test_memory(group, times):
    shape = (4096, 4096)
    assert 2 * 4096 * 4096 / Int4(group_size=group).nbytes(shape) == pytest.approx(times, abs=0.006)


def test_any_group_size_and_a_wide_shape_tensor_can_be_read():
    weight = normal(4, 96)
    parts = Int4(group_size=16).quantize(weight)
    wide = {**parts, SHAPE: parts[SHAPE].long()}
    assert torch.equal(Int4(group_size=128).dequantize(wide), Int4(group_size=16).dequantize(parts))


@pytest.mark.parametrize(
    ("columns", "group", "message"),
    [
        (96, 128, "does not divide K = 96; --int4-group-size 16, 32 would"),
        (704, 128, "--int4-group-size 16, 32, 64 would"),
        (40, 16, "--int4-group-size 8, 10, 20, 40 would"),
        (100, 25, "K must be a multiple of 8, not 100"),
    ],
)
def test_a_wrong_group_size_is_refused_with_those_that_would_work(columns, group, message):
    with pytest.raises(ConfigError) as refusal:
        FormatCodec(Int4(group_size=group)).encode_unit(WeightUnit({NAME: torch.ones(4, columns)}))
    assert f"{NAME} [4, {columns}]" in str(refusal.value) and message in str(refusal.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named(bad):
    weight = torch.zeros(4, 128)
    weight[1, 2] = bad
    with pytest.raises(MilesError, match=r"layers\.3\.mlp\.experts\.0\.up_proj\.weight holds 1 values .* at \[1, 2\]"):
        FormatCodec(Int4()).encode_unit(WeightUnit({NAME: weight}))


def test_activations_are_left_alone():
    x = normal(2, 128)
    assert Int4().fake_quantize_activation(x) is x


def test_config_block():
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    assert Int4(group_size=64).config(["lm_head"]) == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    }


@pytest.fixture
def compressor():
    """compressed-tensors' own compressor, and the scheme it reads from our config block."""
    ours = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.base", reason="needs compressed-tensors (extra: test)"
    )
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = quantization.QuantizationConfig.model_validate(Int4(group_size=32).config(["lm_head"]))
    return ours.PackedQuantizationCompressor, config.config_groups["group_0"]


def test_compressed_tensors_gives_the_same_words(compressor):
    """Fed FP32 weights and the stored scale in FP32; its own observer divides by 7.5."""
    theirs, scheme = compressor
    weight = normal(64, 256).bfloat16()
    weight[5, :32] = 0
    ours = Int4(group_size=32).quantize(weight)
    found = theirs.compress({"weight": weight.float(), "weight_scale": ours[SCALES].float()}, scheme)
    assert torch.equal(found[CODES], ours[CODES])
    assert found[SHAPE].tolist() == ours[SHAPE].tolist()


def test_compressed_tensors_decompresses_to_the_same_values(compressor):
    theirs, scheme = compressor
    format = Int4(group_size=32)
    parts = format.quantize(normal(64, 256))
    found = theirs.decompress({**parts, SCALES: parts[SCALES].float()}, scheme)["weight"]
    assert torch.equal(found, format.dequantize(parts))
    stored = theirs.decompress(dict(parts), scheme)["weight"]
    assert torch.equal(stored, format.dequantize(parts).to(stored.dtype))
