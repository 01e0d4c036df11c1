import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.data import WeightUnit
from miles_core.plugin import ConfigError, MilesError
from miles_formats import FormatCodec
from miles_nvfp4.format import CODES, INPUT_SCALE, SCALE, SCALES, Nvfp4, e2m1, pack, unpack, values

EXPERT = "model.layers.3.mlp.experts.0"
MAGNITUDES = [Fraction(m) for m in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
GOLDEN = json.loads(Path(__file__).with_name("golden_transformer_engine.json").read_text(encoding="utf-8"))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def block(*first):
    """One row of one block: these values, then zeros."""
    return torch.tensor([[*first, *[0.0] * (16 - len(first))]])


def nearest_even(x):
    """Code of the E2M1 magnitude nearest to a rational x >= 0, ties to the even code."""
    return min(range(8), key=lambda code: (abs(MAGNITUDES[code] - x), code % 2))


def stored(hexadecimal):
    return torch.tensor(list(bytes.fromhex(hexadecimal)), dtype=torch.uint8)


def signless_zero(codes):
    return torch.where(codes == 8, torch.zeros_like(codes), codes)


# -- elements and packing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "rounded"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (6, 6), (7, 6), (1e30, 6), (math.inf, 6)],
)
def test_ties_go_to_even_and_six_is_the_end(x, rounded):
    assert values(e2m1(torch.tensor([x, -x]))).tolist() == [rounded, -rounded]


@given(st.floats(-8, 8, width=32))
@settings(max_examples=300)
def test_rounding_is_to_the_nearest_with_ties_to_even(x):
    code = int(e2m1(torch.tensor([x]))[0])
    assert code % 8 == nearest_even(min(Fraction(6), abs(Fraction(x))))
    assert code // 8 == (math.copysign(1, x) < 0)


def test_every_code_means_its_number():
    every = torch.arange(16, dtype=torch.uint8)
    assert values(every).tolist() == [float(m) for m in MAGNITUDES] + [-float(m) for m in MAGNITUDES]
    assert torch.equal(e2m1(values(every)), every)


def test_the_even_index_is_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack(pack(codes)), codes)


# -- known answers ------------------------------------------------------------------------------------------------------


def test_known_scales():
    weight = torch.cat([block(6.0, -3.0, 0.5), block(3.0, 1.5)], dim=1)
    parts = Nvfp4().quantize(weight)
    assert parts[SCALE].item() == np.float32(1) / np.float32(448)
    assert parts[SCALES].float().tolist() == [[448, 224]]
    codes = values(unpack(parts[CODES]))[0]
    assert codes[:3].tolist() == [6, -3, 0.5] and codes[16:18].tolist() == [6, 3]  # the inverse is 1, then 2
    assert parts[INPUT_SCALE].item() == 1


def test_the_sixth_is_the_fp32_number():
    sixth = torch.div(torch.tensor(1.0), torch.tensor(6.0))
    assert sixth.view(torch.int32).item() == 0x3E2AAAAB


def test_the_outer_scale_is_the_reciprocal_of_a_quotient():
    """1 / (2688 / amax), not amax / 2688, which differs in a quarter of all mantissas."""
    amaxes = (1 + np.arange(1000, dtype=np.float32) / np.float32(1000)).astype(np.float32)
    found = np.array([Nvfp4().quantize(block(float(a)))[SCALE].item() for a in amaxes], dtype=np.float32)
    assert np.array_equal(found, np.float32(1) / (np.float32(2688) / amaxes))
    assert 0.15 < np.mean(found != amaxes / np.float32(2688)) < 0.35


@pytest.mark.parametrize("four_over_six", [False, True])
def test_a_matrix_of_zeros_and_a_block_of_zeros(four_over_six):
    format = Nvfp4(four_over_six)
    parts = format.quantize(torch.zeros(2, 32))
    assert parts[SCALE].item() == 1 and not parts[CODES].any() and not parts[SCALES].float().any()
    parts = format.quantize(torch.cat([block(5.0), torch.full((1, 16), -0.0)], dim=1))
    assert parts[SCALES].float()[0, 1] == 0 and not unpack(parts[CODES])[0, 16:].any()
    assert not format.dequantize(parts)[0, 16:].any()


def test_a_block_whose_scale_rounds_to_zero_has_codes_zero():
    parts = Nvfp4().quantize(torch.cat([block(6.0), block(-1e-6, 5e-7)], dim=1))
    assert parts[SCALES].float()[0, 1] == 0 and not unpack(parts[CODES])[0, 16:].any()


@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-140, 1e-38, 3e38])
def test_extreme_magnitudes_stay_finite(amax):
    parts = Nvfp4().quantize(block(amax, -amax / 2))
    assert parts[SCALE].isfinite() and parts[SCALES].float().isfinite().all()
    found = Nvfp4().dequantize(parts)[0]
    assert found.isfinite().all()
    if amax > 1e-37:
        assert found[:2].tolist() == pytest.approx([amax, -amax / 2], rel=0.01)


# -- the rule, in arithmetic of numpy ---------------------------------------------------------------------------------------


def e4m3(x):
    """An FP32 number >= 0 rounded to E4M3, over the rationals."""
    x = min(Fraction(float(x)), Fraction(448))
    exponent = max(-6, math.frexp(float(x))[1] - 1)
    step = Fraction(2) ** (exponent - 3)
    return np.float32(float(round(x / step) * step))


def by_the_rule(weight, amax):
    """Block scales, codes and outer scale of one row, one FP32 operation at a time."""
    one, largest = np.float32(1), np.float32(np.finfo(np.float32).max)
    with np.errstate(over="ignore", divide="ignore"):
        encode = min(np.float32(2688) / amax, largest) if amax > 0 else one
        decode = one / encode
        scales, codes = [], []
        for members in weight.reshape(-1, 16):
            scale = e4m3(np.abs(members).max() * (encode * (one / np.float32(6))))
            inverse = min(one / (scale * decode), largest)
            scales.append(float(scale))
            for x in members:
                product = min(float(np.abs(x * inverse)), 6.0)
                code = nearest_even(Fraction(product)) if scale > 0 else 0
                codes.append(code + 8 if scale > 0 and np.signbit(x) else code)
    return scales, codes, float(decode)


@given(
    st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=32),
    st.floats(1, 4, width=32),
)
@settings(max_examples=200)
def test_codes_and_scales_are_those_of_the_rule(row, larger):
    weight = torch.tensor([row + [0.0] * (32 - len(row))])
    amax = (weight.abs().amax() * larger).to(torch.float32)
    parts = Nvfp4().quantize(weight, amax)
    scales, codes, decode = by_the_rule(weight.numpy()[0], np.float32(amax.item()))
    assert parts[SCALES].float()[0].tolist() == scales
    assert parts[SCALE].item() == decode
    assert unpack(parts[CODES])[0].tolist() == codes


@pytest.mark.parametrize("given", range(len(GOLDEN)))
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("kind", ["matrix", "pair", "token"])
def test_codes_and_scales_equal_transformer_engines_reference(given, four_over_six, kind):
    """Golden values made by golden_transformer_engine.py, signs of zeros and blocks with scale 0 apart."""
    rows, columns = GOLDEN[given]["shape"]
    (case,) = (c for c in GOLDEN[given]["cases"] if (c["kind"], c["four_over_six"]) == (kind, four_over_six))
    x = stored(GOLDEN[given]["x"]).view(torch.bfloat16).reshape(rows, columns).float()
    amax = stored(case["amax"]).view(torch.float32)
    codes, scales, _ = Nvfp4(four_over_six)._encode(x, amax.reshape(rows, 1) if kind == "token" else amax[0])
    assert torch.equal(scales.view(torch.uint8).flatten(), stored(case["scales"]))
    expected = unpack(stored(case["codes"]).reshape(rows, -1))
    zero = (scales.float() == 0).repeat_interleave(16, 1)
    assert torch.equal(signless_zero(codes)[~zero], signless_zero(expected)[~zero])
    assert not codes[zero].any() and not zero.all()


def test_torchao_gives_the_same_codes_on_plain_inputs():
    theirs = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="needs torchao (extra: test)")
    weight = normal(128, 256).bfloat16()
    parts = Nvfp4().quantize(weight)
    scales, packed = theirs.nvfp4_quantize(weight, 16, parts[SCALE])
    assert torch.equal(scales.view(torch.uint8), parts[SCALES].view(torch.uint8))
    assert torch.equal(signless_zero(unpack(packed.view(torch.uint8))), signless_zero(unpack(parts[CODES])))


# -- properties ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.floats(2.0**-90, 2.0**90), st.booleans())
@settings(max_examples=100)
def test_quantising_the_dequantised_gives_the_same_codes_and_scales(seed, magnitude, tail):
    weight = normal(4, 64, seed=seed) * magnitude
    if tail:
        weight[:, ::16] *= 2.0 ** (seed % 16)
    pair = weight.abs().amax() * (1 + seed % 3)
    format = Nvfp4()
    once = format.quantize(weight, pair)
    other = torch.full((1, 16), float(pair))  # the half of the pair that holds the maximum
    back = format.stats(format.dequantize(format.quantize(other, pair))).maximum(format.stats(format.dequantize(once)))
    twice = format.quantize(format.dequantize(once), back)
    assert twice[SCALE].item() == pytest.approx(once[SCALE].item(), rel=2.0**-22)
    kept = once[SCALES].float() >= 3 * 2.0**-9
    assert torch.equal(once[SCALES].float()[kept], twice[SCALES].float()[kept])
    codes = [signless_zero(unpack(p[CODES])).reshape(4, 4, 16)[kept] for p in (once, twice)]
    assert torch.equal(*codes)


@pytest.mark.parametrize(("four_over_six", "band"), [(False, 0.0951), (True, 0.0870)])
def test_the_error_bands(four_over_six, band):
    weight = normal(2048, 1024)
    format = Nvfp4(four_over_six)
    assert float((format.dequantize(format.quantize(weight)) - weight).norm() / weight.norm()) == pytest.approx(
        band, abs=0.0005
    )


def test_four_over_six_takes_four_where_it_loses_less_and_six_on_ties():
    """5 of 6 lies half-way between 4 and 6; with 6 mapped to 4 it is 10/3, near 3.5."""
    format = Nvfp4(four_over_six=True)
    near = format.quantize(block(6.0, 5.0, 5.0, 5.0))
    exact = format.quantize(block(6.0, 3.0, 1.0, 0.5))
    assert near[SCALES].float()[0, 0] == 384 and values(unpack(near[CODES]))[0, :2].tolist() == [4, 3]
    assert exact[SCALES].float()[0, 0] == 256 and values(unpack(exact[CODES]))[0, :4].tolist() == [6, 3, 1, 0.5]
    tie = format.quantize(block(6.0))  # both represent the one value there is
    assert tie[SCALES].float()[0, 0] == 256


def test_four_over_six_never_loses():
    weight = normal(64, 256)
    plain, option = Nvfp4(), Nvfp4(four_over_six=True)
    errors = [(f.dequantize(f.quantize(weight)) - weight).square().sum() for f in (plain, option)]
    assert errors[1] < errors[0]


def test_bytes_a_weight():
    assert Nvfp4().nbytes((1024, 2048)) == 4.5 / 8 * 1024 * 2048 + 8


# -- gate and up, experts only ------------------------------------------------------------------------------------------------


def test_gate_and_up_share_the_larger_maximum():
    gate, up = normal(8, 32).bfloat16(), (3 * normal(8, 32, seed=1)).bfloat16()  # the codec quantises the BF16 copy
    names = [f"{EXPERT}.{n}.weight" for n in ("gate_proj", "up_proj")]
    encoded = FormatCodec(Nvfp4()).encode_unit(WeightUnit(dict(zip(names, (gate, up), strict=True))))
    scales = {e.name: e.parts[e.name.replace("weight", "weight_scale_2")].item() for e in encoded}
    alone = Nvfp4().quantize(up)[SCALE].item()
    assert set(scales.values()) == {alone} != {Nvfp4().quantize(gate)[SCALE].item()}


def test_a_lone_half_is_refused():
    with pytest.raises(ConfigError, match=r"encodes it together with .*up_proj\.weight, which did not come with it"):
        FormatCodec(Nvfp4()).encode_unit(WeightUnit({f"{EXPERT}.gate_proj.weight": normal(8, 32)}))


def test_only_matrices_of_experts_are_quantised():
    selector = FormatCodec(Nvfp4()).selector
    layer = "model.layers.3"
    experts = [f"{layer}.mlp.{e}.down_proj.weight" for e in ("experts.7", "shared_experts", "shared_expert")]
    others = [f"{layer}.self_attn.q_proj.weight", f"{layer}.mlp.down_proj.weight", f"{layer}.mlp.gate.weight"]
    assert [selector(n, (8, 32)) for n in experts] == [True] * 3
    assert [selector(n, (8, 32)) for n in [*others, f"{layer}.mlp.shared_expert_gate.weight"]] == [False] * 4


@pytest.mark.parametrize(("columns", "near"), [(40, "32 or 48"), (8, "16")])
def test_k_that_16_does_not_divide_is_refused_with_name_shape_and_sizes(columns, near):
    unit = WeightUnit({f"{EXPERT}.down_proj.weight": torch.ones(4, columns)})
    with pytest.raises(ConfigError, match=rf"0\.down_proj\.weight \[4, {columns}\] .* of 16: {near}, not"):
        FormatCodec(Nvfp4()).encode_unit(unit)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named(bad):
    weight = torch.zeros(4, 32)
    weight[1, 2] = bad
    with pytest.raises(MilesError, match=r"experts\.0\.down_proj\.weight holds 1 values .* at \[1, 2\]"):
        FormatCodec(Nvfp4()).encode_unit(WeightUnit({f"{EXPERT}.down_proj.weight": weight}))


# -- activations, files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_is_quantised_as_a_matrix_of_its_own(dtype, four_over_six):
    format = Nvfp4(four_over_six)
    x = (normal(2, 5, 64) * torch.tensor([1e-3, 1, 10, 1e3, 0])[:, None]).to(dtype)
    found = format.fake_quantize_activation(x)
    assert found.dtype == dtype and found.shape == x.shape
    for token in range(5):
        alone = format.dequantize(format.quantize(x[1, token : token + 1]))[0]
        assert torch.equal(found[1, token], alone.to(dtype))


@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_token_that_is_not_finite_becomes_nan_and_leaves_the_others(bad, four_over_six):
    format, x = Nvfp4(four_over_six), normal(2, 64)
    clean = format.fake_quantize_activation(x)
    x[0, 3] = bad
    found = format.fake_quantize_activation(x)
    assert found[0].isnan().all() and torch.equal(found[1], clean[1])


def test_config_block_and_its_second_file_name_the_same_modules():
    left = ["lm_head", "model.layers.0.self_attn.q_proj"]
    assert Nvfp4().config(left) == {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": left,
    }
    assert Nvfp4().files(left) == {
        "hf_quant_config.json": {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": left},
        }
    }
