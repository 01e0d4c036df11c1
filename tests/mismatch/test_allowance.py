"""How much rounding explains."""

import math

import pytest

from miles_core.mismatch.agreement import Agreement
from miles_core.mismatch.allowance import Side, allowance

FP8 = Side("bfloat16", "fp8", 0.03, rounds_inputs=True)


def found(median=0.0, stretch=0.0, slope=0.0, error=0.0):
    return Agreement(320, median, stretch, 0, 32, slope, error)


def test_lower_precision_allows_more_and_none_allows_a_scaled_logit():
    single, half = Side("float32"), Side("bfloat16")
    middle = allowance(Side("float16"), Side("float16")).median
    assert allowance(single, single).median < middle < allowance(half, half).median
    limits = [allowance(single, single), allowance(half, half), allowance(FP8, half)]
    assert limits[0].median < limits[1].median < limits[2].median
    assert limits[0].slope < limits[1].slope < 0.03


def test_codes_of_one_format_are_the_same_on_both_sides():
    weights_only = Side("bfloat16", "int4", 0.13)
    assert allowance(weights_only, weights_only) == allowance(Side("bfloat16"), Side("bfloat16"))
    assert allowance(FP8, FP8).median < allowance(FP8, Side("bfloat16")).median


@pytest.mark.parametrize(
    ("agreement", "words"),
    [
        (found(median=0.2), "half of the tokens differ by more than 0.2 nats"),
        (found(stretch=0.5), "of the 32 tokens from position 32 on, half differ by more than 0.5"),
        (found(slope=-0.03), "0.970 times as far apart"),
        (Agreement(3, math.inf, math.inf, 0, 0, math.inf, 0.0, finite=False), "not finite"),
    ],
)
def test_what_exceeds_is_named(agreement, words):
    (phrase,) = allowance(Side("bfloat16"), Side("bfloat16")).find_exceeded(agreement)
    assert words in phrase
    assert not allowance(Side("bfloat16"), Side("bfloat16")).find_exceeded(found(slope=-0.03, error=0.01))


def test_a_side_says_its_precision():
    assert str(FP8) == "bfloat16, fp8" and str(Side("float32", cache="float8_e5m2")) == "float32, float8_e5m2 cache"
