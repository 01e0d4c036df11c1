from miles_embedded.testing import FormatInModelContract
from miles_mxfp8.format import Mxfp8


class TestMxfp8(FormatInModelContract):
    kernels = "miles_mxfp8.kernels"
    magnitudes = (1e-15, 1e-3, 1e15)

    def make(self):
        return Mxfp8()
