import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.data.sample import Sample
from miles_core.data.world import World
from miles_core.train.data_shard import divide_samples


@pytest.mark.parametrize("place", [(1, 1), (-1, 1), (0, 2, 2, 2), (0, 1, 0, 2)])
def test_places_that_do_not_exist(place):
    with pytest.raises(ValueError, match="is not a valid world"):
        World(*place)


def rollout(groups, per_group, lengths):
    return [
        Sample(tokens=[0] * lengths[g % len(lengths)], group_index=g, index=g * per_group + i)
        for g in range(groups)
        for i in range(per_group)
    ]


@given(
    st.integers(0, 12),
    st.integers(1, 4),
    st.lists(st.integers(1, 50), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_every_sample_once_and_groups_whole(groups, per_group, lengths, replicas, steps):
    samples = rollout(groups, per_group, lengths)
    step_of = [i * steps // max(len(samples), 1) for i in range(len(samples))]  # steps cut groups
    found = divide_samples(samples, step_of, replicas)
    assert len(found) == replicas and sorted(i for mine in found for i in mine) == list(range(len(samples)))
    assert all(mine == sorted(mine) for mine in found)
    home = {samples[i].group_index: r for r, mine in enumerate(found) for i in mine}
    assert all(home[samples[i].group_index] == r for r, mine in enumerate(found) for i in mine)


@given(st.integers(1, 20), st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 4))
def test_the_largest_share_is_near_the_mean(groups, lengths, replicas):
    samples = rollout(groups, 2, lengths)
    load = [sum(len(samples[i].tokens) for i in mine) for mine in divide_samples(samples, [0] * len(samples), replicas)]
    sizes = [2 * lengths[g % len(lengths)] for g in range(groups)]
    # What is given last goes to the smallest share, which then holds at most the mean of the others (R. Graham, 1966).
    assert max(load) <= sum(sizes) / replicas + max(sizes) * (1 - 1 / replicas) + 1e-9


def test_fewer_groups_than_replicas_leave_some_without():
    found = divide_samples(rollout(2, 3, [5]), [0] * 6, 3)
    assert sorted(map(len, found)) == [0, 3, 3]
