import pytest
import torch

from miles_core.algorithm.dapo import overlong_penalty
from miles_core.errors import ConfigError


def test_flat_then_linear_then_flat():
    lengths = torch.tensor([0, 16384, 18432, 20480, 30000])
    assert overlong_penalty(lengths, 20480, 4096).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, 20480, 4096, factor=2.0).tolist() == [0.0, 0.0, -1.0, -2.0, -2.0]


@pytest.mark.parametrize("buffer", [0, 11])
def test_an_impossible_buffer_is_refused(buffer):
    with pytest.raises(ConfigError, match=f"between 1 and the longest response 10, got {buffer}"):
        overlong_penalty(torch.tensor([1]), 10, buffer)
