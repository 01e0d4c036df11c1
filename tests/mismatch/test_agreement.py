"""Statistics that tell another function from rounding."""

import math

import numpy as np
import pytest

from miles_core.mismatch.agreement import STRETCH, compare


def scores(tokens=320, seed=0):
    draw = np.random.default_rng(seed)
    return draw.normal(-6, 3, tokens)


def test_equal_scores():
    found = compare([scores()], [scores()])
    assert (found.median, found.stretch, found.slope) == (0, 0, 0) and found.tokens == 320


def test_a_scale_shows_in_the_slope_though_the_mean_is_the_same():
    trainer = scores()
    engine = 0.97 * trainer + 0.03 * trainer.mean()
    found = compare([engine], [trainer])
    assert abs((engine - trainer).mean()) < 1e-9
    assert found.slope == pytest.approx(-0.03, abs=1e-3)


def test_noise_has_no_slope_beyond_its_error():
    for seed in range(20):
        noise = np.random.default_rng(100 + seed).normal(0, 0.1, 320)
        found = compare([scores(seed=seed) + noise], [scores(seed=seed)])
        assert abs(found.slope) < 4 * found.slope_error < 0.05


def test_a_difference_behind_a_position_shows_in_a_stretch():
    trainer = scores()
    engine = trainer + 0.5 * (np.arange(320) >= 256)
    found = compare([trainer[:20], engine], [trainer[:20], trainer])
    assert found.median == 0 and found.stretch == pytest.approx(0.5)
    assert (found.sequence, found.position) == (1, 256)


def test_the_few_tokens_whose_route_flipped_do_not_count():
    trainer = scores()
    engine = trainer + 3.0 * (np.arange(320) % 10 == 0)
    found = compare([engine], [trainer])
    assert found.median == 0 and found.stretch == 0 and abs(found.slope) < 1e-9


def test_numbers_that_are_not_finite_and_no_tokens():
    assert not compare([np.array([np.nan, 1.0])], [np.zeros(2)]).finite
    assert compare([], []).tokens == 0
    short = compare([np.ones(3)], [np.zeros(3)])
    assert short.stretch == 1 and math.isinf(short.slope_error)
    assert compare([np.zeros(STRETCH)], [np.zeros(STRETCH)]).stretch == 0
