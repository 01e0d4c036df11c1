import pytest

from miles_embedded.testing import FormatInModelContract
from miles_int4.format import Int4


class TestGroupsOf128(FormatInModelContract):
    kernels = "miles_int4.kernels"
    magnitudes = (1e-2, 1e4)  # the floor of the scale, 1e-5, is felt below

    def make(self):
        return Int4()


class TestGroupsOf32(FormatInModelContract):
    kernels = "miles_int4.kernels"
    magnitudes = (1e-2, 1e4)

    def make(self):
        return Int4(group_size=32)


class TestExpertsOnly(FormatInModelContract):
    kernels = "miles_int4.kernels"
    magnitudes = (1e-2, 1e4)

    def make(self):
        return Int4(group_size=64, experts_only=True)


def test_the_contract_would_notice_other_codes():
    class Other(Int4):
        def quantize(self, weight, stats=None, out=None):
            return super().quantize(weight * 1.25, stats, out)

    suite = type("Suite", (FormatInModelContract,), {"make": lambda self: Other()})()
    with pytest.raises(AssertionError):
        suite.test_the_round_trip_stays_within_the_declared_error()
