import math
from types import SimpleNamespace

import pytest

from miles_core.data.sample import Sample, reward_value, reward_values
from miles_core.errors import DataError


def test_a_number_or_the_keyed_part_of_a_dict():
    assert reward_value(SimpleNamespace(reward=2, index=1)) == 2.0
    assert reward_value(SimpleNamespace(reward=2, index=1), "acc") == 2.0
    assert reward_value(SimpleNamespace(reward={"acc": 0.5}, index=1), "acc") == 0.5


def test_no_reward_names_the_sample():
    with pytest.raises(DataError, match="reward of sample 7 is None"):
        reward_value(SimpleNamespace(reward=None, index=7))


def test_rewards_of_all_samples_are_those_of_each():
    made = [Sample(reward=reward, index=index) for index, reward in enumerate([0.5, True, 2, {"acc": 0.25}, -1.0])]
    assert reward_values(made, "acc") == [reward_value(sample, "acc") for sample in made] == [0.5, 1.0, 2.0, 0.25, -1.0]
    assert reward_values(made[:1] + made[4:]) == [0.5, -1.0] and reward_values([]) == []


@pytest.mark.parametrize(
    ("reward", "fault"), [(math.nan, "is nan"), (math.inf, "is inf"), (1e31, "between"), (None, "is None")]
)
def test_an_invalid_reward_among_valid_ones_names_the_sample(reward, fault):
    made = [Sample(reward=value, index=index) for index, value in enumerate([0.5, reward, 1.0])]
    with pytest.raises(DataError, match=f"the reward of sample 1 .*{fault}"):
        reward_values(made)
