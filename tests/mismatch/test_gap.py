import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.data.sample import Sample
from miles_core.mismatch.gap import WORST, measure


def sample(index, tokens, response, mask=None):
    return Sample(tokens=tokens, response_length=response, index=index, loss_mask=mask)


def words(ids):
    return "".join(chr(97 + i) for i in ids)


def test_known_values():
    """delta = trainer - engine."""
    gap = measure([np.array([-1.05, -3.0, -0.5, -2.0])], [np.array([-1.0, -2.0, -0.5, -3.0])])
    assert gap.tokens == 4
    assert gap.mean_abs == pytest.approx((0.05 + 1 + 0 + 1) / 4)
    assert gap.max_abs == pytest.approx(1)
    assert gap.kl_k1 == pytest.approx(-0.05 / 4)
    ratio = np.array([1.051271, 2.718282, 1.0, 0.367879])
    assert gap.kl_k3 == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-5)


def test_masked_tokens_do_not_count():
    samples = [sample(0, [1, 2, 3, 4], 2, [0, 1])]
    assert measure([np.array([9.0, -1.0])], [np.array([0.0, -1.5])], samples).mean_abs == pytest.approx(0.5)


def test_the_worst_tokens_come_first_with_their_context():
    tokens = list(range(20))
    engine = [np.full(12, -1.0), np.full(2, -1.0)]
    trainer = [engine[0].copy(), engine[1].copy()]
    trainer[0][5], trainer[1][0] = -1.5, -3.0
    found = measure(engine, trainer, [sample(7, tokens, 12), sample(9, tokens[:6], 2)], words).worst
    assert len(found) == WORST
    assert [(w.sample, w.position, w.token, w.delta) for w in found[:2]] == [(9, 0, 4, -2.0), (7, 5, 13, -0.5)]
    assert (found[1].before, found[1].text, found[1].after) == ("hijklm", "n", "opqrst")
    assert (found[0].before, found[0].after) == ("abcd", "f")
    assert "engine -1.0000, trainer -3.0000" in str(found[0])


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_not_finite_is_an_infinite_gap_and_the_worst_token(value):
    samples = [sample(0, [1, 2, 3], 2)]
    gap = measure([np.array([-1.0, value])], [np.array([-1.0, -1.0])], samples, words)
    assert gap.mean_abs == gap.max_abs == np.inf
    assert np.isfinite(gap.kl_k3)
    assert gap.worst[0].position == 1


def test_no_tokens():
    assert measure([], []).tokens == 0


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=50))
def test_properties(pairs):
    engine, trainer = (np.array(x) for x in zip(*pairs, strict=True))
    gap, back = measure([engine], [trainer]), measure([trainer], [engine])
    assert gap.kl_k3 >= 0
    assert gap.mean_abs == pytest.approx(back.mean_abs) and gap.kl_k1 == pytest.approx(-back.kl_k1)
    assert list(gap.quantiles.values()) == sorted(gap.quantiles.values())
    assert gap.quantiles["0.999"] <= gap.max_abs
