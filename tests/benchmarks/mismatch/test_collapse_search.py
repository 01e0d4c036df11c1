"""The rule that chooses the setting of the experiment."""

import pytest

from benchmarks.mismatch import collapse_search as search

RISE = [i / 20 for i in range(20)]


def test_the_loss_counts_a_fall_and_a_shortfall():
    fall = RISE + [0.2] * 20
    assert search.judge({"bf16": RISE + [0.95] * 20, "plain": fall})["loss"] == pytest.approx(1 - 0.2 / 0.95, abs=1e-3)
    slow = search.judge({"bf16": [0.1] * 20 + [0.2] * 20, "plain": fall})
    assert slow["loss"] == pytest.approx(1 - 0.2 / slow["plain"][4], abs=1e-3) and slow["plain"][4] > 0.7


def test_a_setting_in_which_bf16_falls_or_does_not_learn_is_not_admitted():
    plain = [0.5] * 40
    assert search.judge({"bf16": RISE + [0.95] * 20, "plain": plain})["admitted"]
    assert not search.judge({"bf16": RISE + [0.6] * 20, "plain": plain})["admitted"]
    assert not search.judge({"bf16": [0.5] * 40, "plain": plain})["admitted"]
    assert not search.judge({"bf16": RISE[:8], "plain": plain})["admitted"]


def test_arms_are_compared_over_the_steps_that_both_have_made():
    row = search.judge({"bf16": RISE + [0.95] * 20 + [0.0] * 40, "plain": [0.5] * 40})
    assert row["steps"] == 40 and row["admitted"]


def test_the_rest_of_a_curve_is_cut_from_its_beginning():
    assert search.tenths([9.0] * 5 + [float(i) for i in range(10) for _ in range(2)]) == list(range(10))


def test_admitted_settings_come_before_larger_losses():
    table = {"a": {"admitted": False, "loss": 0.9}, "b": {"admitted": True, "loss": 0.1}}
    table["c"] = {"admitted": True, "loss": 0.3}
    assert search.choose(table) == "c"
    assert search.choose({"a": table["a"], "d": {"admitted": False, "loss": 0.2}}) == "a"


def test_every_setting_is_a_command_line_of_the_experiment(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["collapse_search.py", "--out", str(tmp_path), "--device", "cuda"])
    given = search.parse()
    places = {run.place for name in search.SETTINGS for run in search.runs_of(given, name)}
    assert len(places) == 2 * len(search.SETTINGS)
    assert all("--dtype bfloat16" in run.words for run in search.runs_of(given, "long-a"))
    given.device = "cpu"
    assert all("--dtype float32" in run.words for run in search.runs_of(given, "long-a"))
