from types import SimpleNamespace

import pytest

from miles_core.data.sample import reward_value
from miles_core.errors import DataError


def test_a_number_or_the_keyed_part_of_a_dict():
    assert reward_value(SimpleNamespace(reward=2, index=1)) == 2.0
    assert reward_value(SimpleNamespace(reward=2, index=1), "acc") == 2.0
    assert reward_value(SimpleNamespace(reward={"acc": 0.5}, index=1), "acc") == 0.5


def test_no_reward_names_the_sample():
    with pytest.raises(DataError, match="reward of sample 7 is None"):
        reward_value(SimpleNamespace(reward=None, index=7))
