from miles_core.testing.format_contract import FormatContract
from miles_mxfp8.format import Mxfp8


class TestMxfp8(FormatContract):
    magnitudes = (1e-15, 1e-3, 1e15)

    def make(self):
        return Mxfp8()
