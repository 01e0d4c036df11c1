import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.plugin import DataError
from miles_r3.codec import _HEADER, decode, encode, set_bits


def record(tokens, layers, experts, k, ordered, seed=0, missing=0.0):
    generator = np.random.default_rng(seed)
    routes = generator.random((tokens, layers, experts)).argsort(-1)[..., :k].astype(np.int32)
    if ordered:
        routes.sort(-1)
    routes[generator.random((tokens, layers)) < missing] = -1
    return routes


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 9),
    layers=st.integers(1, 5),
    experts=st.integers(1, 300),
    k=st.integers(1, 12),
    ordered=st.booleans(),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 9),
)
def test_the_round_trip_is_exact(tokens, layers, experts, k, ordered, missing, seed):
    routes = record(tokens, layers, experts, min(k, experts), ordered, seed, missing)
    found = decode(encode(routes, experts))
    assert found.dtype == np.int32 and np.array_equal(found, routes)


def test_extreme_sets_come_back():
    for experts, k in ((128, 8), (256, 8), (512, 8), (64, 6), (8, 2), (4, 4), (512, 10)):
        lowest, highest = np.arange(k), np.arange(experts - k, experts)
        routes = np.stack([lowest, highest])[:, None].astype(np.int32)
        assert np.array_equal(decode(encode(routes, experts)), routes)


def size(routes, experts):
    return (len(encode(routes, experts)) - _HEADER.size) / len(routes)


def test_bytes_a_token_of_a_large_model():
    ascending = record(64, 48, 128, 8, ordered=True)
    as_chosen = record(64, 48, 128, 8, ordered=False)
    assert ascending.nbytes / 64 == 1536
    assert size(ascending, 128) == 48 * set_bits(128, 8) / 8 == 246
    assert size(as_chosen, 128) == 48 * 8 * 7 / 8 == 336
    assert 48 * math.log2(math.comb(128, 8)) / 8 == pytest.approx(242, abs=0.5)


def test_a_header_a_sample_and_no_more():
    assert len(encode(record(0, 4, 8, 2, True), 8)) == _HEADER.size < 40


@pytest.mark.parametrize("ordered", [True, False])
def test_what_was_truncated_or_changed_is_refused(ordered):
    payload = encode(record(5, 3, 16, 4, ordered, missing=0.2), 16)
    for cut in (1, 7, len(payload) - _HEADER.size):
        with pytest.raises(DataError, match="does not match its digest"):
            decode(payload[:-cut])
    for at in (4, 9, _HEADER.size - 1, _HEADER.size, len(payload) - 1):
        changed = bytearray(payload)
        changed[at] ^= 1
        with pytest.raises(DataError, match="digest"):
            decode(bytes(changed))
    with pytest.raises(DataError, match="not a routing record"):
        decode(payload[:10])
    with pytest.raises(DataError, match="not a routing record"):
        decode(b"x" + payload[1:])


@pytest.mark.parametrize(
    ("row", "words"), [([0, 8], "expert 8, and the model has 8"), ([-1, 3], "expert -1"), ([-2, 1], "expert -2")]
)
def test_what_no_router_gives_is_refused(row, words):
    with pytest.raises(DataError, match=words):
        encode(np.array([[row]]), 8)


def test_another_shape_is_refused():
    with pytest.raises(DataError, match="3 dimensions"):
        encode(np.zeros((2, 2)), 8)
