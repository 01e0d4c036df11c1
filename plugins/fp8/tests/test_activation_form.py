"""The forms that multiply, against their formula written out number by number."""

import bisect
import math

import numpy as np
import pytest
import torch

from miles_core.plugin import ConfigError, PlanError
from miles_fp8.activation_form import FORMS
from miles_fp8.format import Fp8, round_up_to_power_of_two

ONE, LARGEST = np.float32(1), np.float32(448)

#: The magnitudes of E4M3, code 0 to 126, from the definition of its bits.
MAGNITUDES = [
    (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    for exponent in range(16)
    for mantissa in range(8)
][:127]


def e4m3(value):
    """Nearest magnitude, ties to the even code; plain Python."""
    size = min(abs(float(value)), 448.0)
    above = bisect.bisect_left(MAGNITUDES, size)
    below = above if above < len(MAGNITUDES) and MAGNITUDES[above] == size else above - 1
    left, right = size - MAGNITUDES[below], MAGNITUDES[min(above, 126)] - size
    code = below if left < right or (left == right and below % 2 == 0) else min(above, 126)
    return np.float32(math.copysign(MAGNITUDES[code], value))


def literal(block, form):
    amax = np.maximum(np.abs(block).max(), np.float32(1e-10))
    if form == "reciprocal":
        scale = amax / LARGEST
        factor = ONE / scale
    else:
        scale = amax * (ONE / LARGEST)
        factor = LARGEST / amax
    return np.array([e4m3(v * factor) * scale for v in block], np.float32)


def values(kind):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, 200, generator=generator)
    if kind == "heavy tails":
        x = x / torch.rand(24, 200, generator=generator).clamp(min=1e-4)
    if kind == "small":
        x = x * 1e-11  # below the floor of amax
    if kind == "zeros":
        x[:, :128] = 0
    return x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["random", "heavy tails", "small", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_formula(form, kind, dtype):
    x = values(kind).to(dtype)
    found = Fp8(activation_form=form).fake_quantize_activation(x)
    assert found.dtype == dtype and found.shape == x.shape
    for row, made in zip(x.float().numpy(), found, strict=True):
        expected = np.concatenate([literal(row[:128], form), literal(row[128:], form)])
        assert torch.equal(made, torch.from_numpy(expected).to(dtype))


def test_the_table_of_magnitudes_is_torchs():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert codes.tolist() == MAGNITUDES


@pytest.mark.parametrize("form", FORMS)
def test_few_codes_differ_from_division_and_some_do(form):
    x = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    divided, made = Fp8().fake_quantize_activation(x), Fp8(activation_form=form).fake_quantize_activation(x)
    differing = float(((made - divided).abs() > 1e-3 * divided.abs()).float().mean())  # other scales move the last bit
    assert 2e-4 < differing < 8e-4
    assert float((made - x).norm() / x.norm()) == pytest.approx(0.0257, abs=0.0003)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_block(form, bad):
    x = values("random")
    clean = Fp8(activation_form=form).fake_quantize_activation(x)
    x[0, 3] = bad
    found = Fp8(activation_form=form).fake_quantize_activation(x)
    assert found[0, :128].isnan().all()
    assert torch.equal(found[0, 128:], clean[0, 128:]) and torch.equal(found[1:], clean[1:])


def test_weights_are_divided_in_every_form():
    weight = values("random")
    for form in FORMS:
        found, divided = Fp8(activation_form=form).quantize(weight), Fp8().quantize(weight)
        assert all(torch.equal(found[k].view(torch.uint8), divided[k].view(torch.uint8)) for k in divided)


@pytest.mark.parametrize("exponent", [-20, 0, 9])
@pytest.mark.parametrize("form", FORMS)
def test_with_power_of_two_scales_every_form_is_one(form, exponent):
    """Which is why the flag is refused with them: the scales are equal for every BF16 maximum, and then so are the codes."""
    amax = torch.arange(128, 256) * 2.0 ** (exponent - 7)
    scale = Fp8(power_of_two_scales=True).scale(amax)
    assert torch.equal(round_up_to_power_of_two(FORMS[form](amax)[0]), scale)
    x = torch.rand(128, 128, generator=torch.Generator().manual_seed(1)) * amax[:, None]
    assert torch.equal(x * (1 / scale)[:, None], x / scale[:, None])


def test_both_sides_of_a_run_compute_in_the_form(toy_run):
    flags = {"rollout_fp8": True, "train_fp8": True, "emulate_precision": True, "family": "qwen3", "steps": 1}
    made = toy_run(**flags, fp8_activation_form="ratio")
    assert made.metrics[0]["mismatch/abs_log_prob"] < 1e-4
    for codec in (made.engine.codec, made.trainer.precision.codec):
        assert codec.format.activation_form == "ratio"


def test_the_flag(plan):
    assert plan(rollout_fp8=True, emulate_precision=True, fp8_activation_form="ratio")
    with pytest.raises(ConfigError, match="it is one of divide, reciprocal or ratio"):
        plan(rollout_fp8=True, emulate_precision=True, fp8_activation_form="inverse")
    with pytest.raises(PlanError, match=r"fp8 needs fp8\.activation_form == divide") as refused:
        plan(rollout_fp8=True, emulate_precision=True, fp8_activation_form="ratio", fp8_power_of_two_scales=True)
    assert "all forms give the same codes" in str(refused.value)
