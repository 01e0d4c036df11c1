"""Scores that move between two syncs as the trainer's do, or not."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from miles_core.errors import MismatchError
from miles_core.mismatch.movement import Scores


def scores(trainer, engine):
    """Scores of one sample at a sync."""
    return Scores([], [trainer], {"": [engine]}, "formats")


POLICY = SimpleNamespace(version=1)


@pytest.mark.parametrize(("noise", "judged"), [(1e-3, False), (0.0, True)])
def test_a_step_that_only_unsure_tokens_show_is_not_judged_by_the_others(noise, judged):
    """A confident model in low precision: nearly all tokens hold rounding, a few moved by more than all mismatch together."""
    draw = np.random.default_rng(0)
    unsure = np.arange(94) >= 90
    step = np.where(unsure, 0.5, draw.normal(size=94) * 1e-3)
    before, rounding = np.zeros(94), draw.normal(size=(2, 94)) * noise
    engine_before, trainer = before + rounding[0], before + step
    engine = trainer + rounding[1] if not judged else before + unsure * 0.5
    last, now = scores(before, engine_before), scores(trainer, engine)
    if judged:
        with pytest.raises(MismatchError, match="stale weights"):
            last.check_movement(POLICY, now)
    else:
        last.check_movement(POLICY, now)  # raises nothing


def test_medians_at_rounding_size_do_not_call_an_engine_stale():
    """Most tokens moved by the last place of float32 on one side and not at all on the other; those that moved agree."""
    tokens = 100
    moved = np.arange(tokens) < 18
    step = np.where(moved, np.linspace(1e-4, 3e-4, tokens), 4.77e-7)
    change = np.where(moved, step, 0.0)
    before = np.zeros(tokens)
    last = scores(before, before)
    assert last.check_movement(POLICY, scores(step, change)) == pytest.approx(1, abs=0.01)
    with pytest.raises(MismatchError, match="still serves the previous weights"):
        last.check_movement(POLICY, scores(step, before))


@pytest.mark.parametrize("stale", [False, True])
def test_movements_that_are_rounding_on_both_sides_are_not_judged(stale):
    """After a small step the rounding of a mixture of experts changes scores by more than the step. A stale engine's scores stay."""
    draw = np.random.default_rng(0)
    step, change, mismatch = draw.normal(size=(3, 248)) * [[0.03], [0.03], [0.06]]
    last, now = scores(np.zeros(248), mismatch), scores(step, mismatch + (0 if stale else change - 0.3 * step))
    with pytest.raises(MismatchError, match="still serves the previous weights") if stale else nullcontext():
        assert last.check_movement(POLICY, now) is None


def test_the_worker_that_moved_least_is_reported():
    step, before = np.linspace(-1, 1, 64), np.zeros(64)
    last = Scores([], [before], {"a": [before], "b": [before + 3], "gone": [before]}, "formats")
    now = Scores([], [step], {"b": [step / 2 + 3], "a": [step], "new": [before]}, "formats")
    assert last.check_movement(POLICY, now) == pytest.approx(0.5)
    assert last.check_movement(POLICY, replace(now, formats="others")) is None
