"""The contracts, which are all that an installed format is expected to do, and values of its own."""

import torch

from miles_embedded.testing import FormatInModelContract
from miles_mxfp6 import plugin
from miles_mxfp6.format import GRID, Mxfp6
from miles_testing import FormatPluginContract


class TestMxfp6(FormatInModelContract):
    def make(self):
        return Mxfp6()


class TestPlugin(FormatPluginContract):
    plugin = plugin
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}  # noqa: RUF012


def codes_of(*values):
    row = torch.zeros(1, 32)
    row[0, : len(values)] = torch.tensor(values)
    parts = Mxfp6().quantize(row)
    return Mxfp6().dequantize(parts)[0, : len(values)].tolist(), parts["weight_scale_inv"].item()


def test_the_magnitudes_are_those_of_e2m3():
    assert GRID.tolist() == sorted(set(GRID.tolist())) and len(GRID) == 32
    assert GRID[[1, 8, 16, 24, 31]].tolist() == [0.125, 1.0, 2.0, 4.0, 7.5]


def test_known_values_and_ties():
    # ties go to the even code: 1/16 -> 0, 3/16 -> 1/4, 2.125 -> 2, 2.375 -> 2.5, 7.25 -> 7
    values, scale = codes_of(7.5, -7.5, 0.0625, 0.1875, 2.125, 2.375, 7.25)
    assert values == [7.5, -7.5, 0.0, 0.25, 2.0, 2.5, 7.0] and scale == 127


def test_the_scale_is_rounded_up():
    assert codes_of(7.6)[1] == 128 and codes_of(3.75)[1] == 126 and codes_of(3.76)[1] == 127


def test_four_codes_lie_in_three_bytes():
    row = torch.zeros(1, 32)
    row[0, :4] = torch.tensor([7.5, 0.125, 0.25, -0.125])  # codes 31, 1, 2, 33
    packed = Mxfp6().quantize(row)["weight"]
    assert packed.shape == (1, 24)
    word = 31 | 1 << 6 | 2 << 12 | 33 << 18
    assert packed[0, :3].tolist() == [word & 255, word >> 8 & 255, word >> 16]
