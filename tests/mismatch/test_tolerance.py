"""How much rounding explains."""

import pytest

from miles_core.mismatch.tolerance import Side, expected_scale, first_step_bound

FP8 = Side("bfloat16", "fp8", 0.03, rounds_inputs=True)


@pytest.mark.parametrize("limit", [expected_scale, first_step_bound])
def test_lower_precision_allows_more(limit):
    single, half, middle = Side("float32"), Side("bfloat16"), Side("float16")
    limits = [limit(*pair) for pair in [(single, single), (middle, middle), (half, half), (FP8, half)]]
    assert limits == sorted(limits) and limits[0] < 0.002 < limits[1] < 0.1 < limits[3] < 0.5


def test_codes_of_one_format_are_the_same_on_both_sides():
    weights_only = Side("bfloat16", "int4", 0.13)
    assert expected_scale(weights_only, weights_only) == expected_scale(Side("bfloat16"), Side("bfloat16"))
    assert expected_scale(FP8, FP8) < expected_scale(FP8, Side("bfloat16"))
    assert weights_only.tipped == 0 and 0 < FP8.tipped < FP8.error


def test_a_side_says_its_precision():
    assert str(FP8) == "bfloat16, fp8" and str(Side("float32", cache="float8_e5m2")) == "float32, float8_e5m2 cache"
