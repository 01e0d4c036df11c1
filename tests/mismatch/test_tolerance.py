"""How much rounding explains."""

from miles_core.mismatch.tolerance import Side, tolerance

FP8 = Side("bfloat16", "fp8", 0.03, rounds_inputs=True)


def test_lower_precision_allows_more():
    single, half, middle = Side("float32"), Side("bfloat16"), Side("float16")
    pairs = [(single, single), (middle, middle), (half, half), (FP8, half)]
    for limits in ([tolerance(*pair).median for pair in pairs], [tolerance(*pair).mean for pair in pairs]):
        assert limits == sorted(limits) and limits[0] < 0.002 < limits[1] < 0.1 < limits[3] < 0.4
    assert tolerance(half, half).median < tolerance(half, half).mean


def test_codes_of_one_format_are_the_same_on_both_sides():
    weights_only = Side("bfloat16", "int4", 0.13)
    assert tolerance(weights_only, weights_only) == tolerance(Side("bfloat16"), Side("bfloat16"))
    assert tolerance(FP8, FP8).median < tolerance(FP8, Side("bfloat16")).median
    assert weights_only.tipped == 0 and 0 < FP8.tipped < FP8.error


def test_a_side_says_its_precision():
    assert str(FP8) == "bfloat16, fp8" and str(Side("float32", cache="float8_e5m2")) == "float32, float8_e5m2 cache"
