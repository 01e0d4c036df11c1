import pytest

from miles_embedded.testing import FormatInModelContract
from miles_nvfp4.format import Nvfp4


class TestNvfp4(FormatInModelContract):
    kernels = "miles_nvfp4.kernels"
    magnitudes = (1e-15, 1e-3, 1e15)
    drift = 2.0**-21  # of the outer scale, and the rounding of the product with it

    def make(self):
        return Nvfp4()


class TestFourOverSix(FormatInModelContract):
    magnitudes = (1e-15, 1e-3, 1e15)
    drift = 2.0**-21

    def make(self):
        return Nvfp4(four_over_six=True)


def test_the_contract_would_notice_scales_of_ones_own():
    class Other(Nvfp4):
        def quantize(self, weight, stats=None, out=None):
            return super().quantize(weight, None, out)

    suite = type("Suite", (FormatInModelContract,), {"make": lambda self: Other()})()
    with pytest.raises(AssertionError):
        suite.test_coupled_weights_share_their_statistics()
