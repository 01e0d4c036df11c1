"""Values of many samples in few bytes, and back with the same types and bits."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_workers.packed_column import IndexList, pack_column, unpack_column

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
NESTED = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)


def travel(values):
    return unpack_column(pickle.loads(pickle.dumps(pack_column(values), 5)), len(values))


def form(value):
    """Type and bits of a value."""
    if isinstance(value, dict):
        return [(key, form(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [form(each) for each in value]
    return type(value), ("nan" if math.isnan(value) else value.hex()) if type(value) is float else value


@given(st.lists(NESTED, min_size=1, max_size=5) | st.builds(lambda value, n: [value] * n, NESTED, st.integers(1, 4)))
@settings(max_examples=300)
def test_types_and_bits_are_preserved(values):
    assert form(travel(values)) == form(values)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.bool_])
def test_numbers_of_numpy_keep_their_type(kind):
    found = travel([kind(1), kind(0)])
    assert found == [1, 0] and {type(value) for value in found} == {kind}


def test_containers_are_new_objects():
    one, other = travel([[(0, 4)], [(0, 4)]])
    one.append((3, 5))
    assert other == [(0, 4)]


@pytest.mark.parametrize(
    ("values", "most"),
    [
        ([7] * 1000, 10),
        ([*range(5000, 6000)], 10),
        ([0.0, 1.0] * 500, 2010),
        ([0.1, 0.25] * 500, 8010),
        ([100, 200] * 500, 2010),
        ([[(0, 4)]] * 1000, 20),
        ([{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}] * 500, 2060),
    ],
)
def test_sizes(values, most):
    assert len(pickle.dumps(pack_column(values), 5)) <= most + 16, "16 bytes are the frame of the pickle"


@given(st.lists(st.integers(0, 20), max_size=30) | st.lists(st.integers(0, 1 << 40), max_size=5))
@settings(max_examples=100)
def test_an_index_list_arrives_as_a_plain_list(numbers):
    found = pickle.loads(pickle.dumps(IndexList(numbers), 5))
    assert found == numbers and type(found) is list and all(type(number) is int for number in found)


def test_runs_of_an_index_list_are_small():
    numbers = [group * 16 + number for group in range(1000) for number in range(8)]
    assert len(pickle.dumps(IndexList(numbers), 5)) < 120
