"""Statistics that tell another function from rounding."""

import numpy as np
import pytest

from miles_core.mismatch.agreement import FLOOR, RATIO, STRETCH, compare, expected_errors
from miles_core.mismatch.generated import judge_draws, judge_greedy

TOKENS = 640


def scores(seed=0):
    return np.random.default_rng(seed).normal(-6, 3, TOKENS)


def noise(size, seed=0):
    return np.random.default_rng(100 + seed).normal(0, size, TOKENS)


def judged(engine, own, reference=None):
    reference = scores() if reference is None else reference
    return compare([reference + engine], [reference + own], [reference]).find_excess()


def test_errors_as_large_as_the_trainers_are_rounding_whatever_their_size():
    for seed in range(20):
        size = 0.01 * 10 ** (seed % 3)
        assert not judged(noise(size, seed), noise(size, 50 + seed))


def test_larger_errors_are_named_with_both_numbers():
    (phrase,) = judged(noise(0.1), noise(0.03, 1))
    assert "wrong by 0.0" in phrase and "on average of 640 tokens" in phrase and "rounding explains 0.03" in phrase


def test_routes_that_both_sides_change_are_rounding():
    """One token of 20 is routed to other experts, on other tokens of either side."""
    for seed in range(20):
        draw = np.random.default_rng(seed)
        sides = [noise(0.02, seed + 40 * n) + (draw.random(TOKENS) < 0.05) * draw.normal(0, 2, TOKENS) for n in (0, 1)]
        assert not judged(*sides)


def test_some_wrong_tokens_are_found_though_the_median_is_zero():
    wrong = np.where(np.arange(TOKENS) % 20 == 0, 0.5, 0.0)
    (phrase,) = judged(wrong, np.zeros(TOKENS))
    assert "at 5% of 640 tokens, where rounding explains 0%" in phrase or "on average" in phrase


def test_an_effect_behind_a_position_is_found_there():
    draw = np.random.default_rng(0)
    tokens = 80 * STRETCH
    behind = draw.normal(0, 0.03, tokens) + 0.07 * (np.arange(tokens) >= tokens - STRETCH)
    (phrase,) = judged(behind, draw.normal(0, 0.03, tokens), draw.normal(-6, 3, tokens))
    assert phrase.startswith(f"from position {tokens - STRETCH} of sequence 0 on")


def test_a_scale_shows_in_the_slope():
    trainer = scores()
    found = judged(-0.03 * (trainer - trainer.mean()) + noise(0.05), noise(0.05, 1))
    assert any("times as far apart" in phrase for phrase in found)


def test_what_is_no_number_is_named():
    engine = scores()
    engine[3] = np.nan
    assert compare([engine], [scores()], [scores()]).find_excess() == ["some log-probabilities are not finite numbers"]
    assert compare([], []).find_excess() == []


def test_without_a_reference_the_declared_errors_are_allowed():
    expected = expected_errors(TOKENS, 0.04)
    assert not compare([scores() + expected], [scores()], own=0.04).find_excess()
    assert compare([scores() + 2 * RATIO * expected], [scores()], own=0.04).find_excess()
    assert not compare([scores() + FLOOR / 2], [scores()], own=0.0).find_excess()


def test_without_a_reference_every_stretch_of_a_long_sequence_may_have_the_declared_errors():
    """The expected errors were in the order of their sizes, so the first stretch of a sound engine's long sequence was refused."""
    draw = np.random.default_rng(0)
    for tokens in (128, 250, 1000):
        trainer = [-draw.exponential(2, tokens) for _ in range(3)]
        engine = [row + draw.normal(0, 0.025, tokens) for row in trainer]
        assert compare(engine, trainer, None, 0.04).find_excess() == []
        engine[1][64:128] += 0.3  # a stretch that is wrong is still found
        assert compare(engine, trainer, None, 0.04).find_excess()


def test_errors_below_the_floor_are_not_judged():
    """With a format that rounds inputs, one code that tips on one side changes many tokens after it."""
    tipped = np.where(np.arange(TOKENS) < 64, 0.01, 0.0)
    assert compare([scores() + tipped], [scores()], [scores()]).find_excess()
    assert not compare([scores() + tipped], [scores()], [scores()], floor=0.016).find_excess()


@pytest.mark.parametrize(("power", "word"), [(1.0, ""), (1 / 0.7, "likely"), (0.7, "unlikely")])
def test_draws_of_another_temperature_are_implausible(power, word):
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 2, (500, 50))
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    drawn = np.exp(power * log_probs)
    drawn /= drawn.sum(1, keepdims=True)
    tokens = [draw.choice(50, p=row) for row in drawn]
    chosen = log_probs[np.arange(500), tokens]
    found = judge_draws([chosen], [-(np.exp(log_probs) * log_probs).sum(1)])
    assert bool(found) == bool(word) and (not word or f"too {word}" in found[0])


def test_a_greedy_token_may_be_second_within_rounding():
    own = noise(0.02)
    assert not judge_greedy([np.abs(noise(0.02, 1))[:100]], own)
    (phrase,) = judge_greedy([np.where(np.arange(100) % 4 == 0, 0.5, 0.0)], own)
    assert "not the most likely" in phrase
