import pytest

from miles_embedded.testing import FormatInModelContract
from miles_fp8.format import Fp8


class TestFp8(FormatInModelContract):
    kernels = "miles_fp8.kernels"
    magnitudes = (1e-6, 1e6)

    def make(self):
        return Fp8()


class TestPowerOfTwoScales(FormatInModelContract):
    kernels = "miles_fp8.kernels"

    def make(self):
        return Fp8(power_of_two_scales=True)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_contract_would_notice_other_codes(power_of_two):
    class Other(Fp8):
        def quantize(self, weight, stats=None, out=None):
            return super().quantize(weight * 1.25, stats, out)

    with pytest.raises(AssertionError):
        suite = type("Suite", (FormatInModelContract,), {"make": lambda self: Other(power_of_two)})()
        suite.test_the_round_trip_stays_within_the_declared_error()
