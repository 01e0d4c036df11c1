"""The page of exact log-probabilities says what the result files say."""

import json
import runpy
from pathlib import Path

DRAWN = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "draw_gaps.py"))


def test_the_page_is_up_to_date():
    assert DRAWN["render"]() == DRAWN["PAGE"].read_text(encoding="utf-8"), "run: python docs/draw_gaps.py"


def test_a_gap_above_zero_is_shown():
    gaps = {"float32": [2e-6, 0.0], "bfloat16": [0.04, 0.002]}
    assert DRAWN["row"]("qwen3", [gaps, gaps]) == "| qwen3 | 2e-06 | 0.04 | 2e-06 | 0.04 | 0, 0.002 |"


def test_training_curves_and_sglang_are_shown_once_they_are_measured(tmp_path, monkeypatch):
    row = {"reward_last": [0.5, 0.1], "reward_best": [0.9, None], "collapsed": 2, "kl_median": 0.01, "gap_largest": 0.2}
    row |= {"steps": [9, 10], "minus_bf16": None}
    curves = {"commit": "abc", "complete": False, "learning_rates": {"0.0006": {"plain": row}}}
    numbers = {"mean": 0.004, "max": 0.1, "differing": 0.25}
    names = ("batch", "phase", "engine_rounding", "trainer_rounding", "engine_trainer", "engine_exact_trainer")
    gaps = {"commit": "abc", "gaps": {"plain": dict.fromkeys(names, numbers), "transformers": {"error": "no"}}}
    (tmp_path / "collapse-2026-01-01-cpu.json").write_text(json.dumps(curves))
    (tmp_path / "sglang_exact-2026-01-01-dense.json").write_text(json.dumps(gaps))
    monkeypatch.setitem(DRAWN["collapse"].__globals__, "RESULTS", tmp_path)
    shown = DRAWN["collapse"]()
    assert "| 0.0006 | `plain` | 9, 10 | 0.500 ± 0.100 | 0.900 | - | 2 | 0.01 | 0.2 |" in shown
    assert "Not all runs are complete: compare arms with equal steps only." in shown
    lines = DRAWN["sglang"]("dense")
    assert "| `plain` | 0.004 | 0.004 | 0.004 | 0.004 | 0.004 | 0.004 | 25.0% |" in lines
    assert "| `transformers` | did not run | | | | | | |" in lines


def test_the_experiment_in_the_chosen_setting_is_shown_once_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(DRAWN["search"].__globals__, "RESULTS", tmp_path)
    assert DRAWN["search"]() == []
    row = {"reward_last": [0.5, 0.1], "reward_best": [0.9, 0.1], "collapsed": 2, "kl_median": 0.01, "gap_largest": 0.2}
    row |= {"steps": [9, 9, 9], "minus_bf16": [-0.4, 0.3]}
    curves = {"commit": "abc", "complete": True, "learning_rates": {"0.001": {"plain": row}}}
    (tmp_path / "collapse-2026-01-01-gpu-search.json").write_text(json.dumps(curves))
    shown = DRAWN["search"]()
    assert "| 0.001 | `plain` | 9, 9, 9 | 0.500 ± 0.100 | 0.900 ± 0.100 | -0.400 ± 0.300 | 2 | 0.01 | 0.2 |" in shown


def test_only_intervals_without_zero_are_called_differences():
    row = {"steps": [9, 9, 9], "collapsed": 0}
    table = {"bf16": row | {"minus_bf16": [0.0, 0.0]}, "plain": row | {"minus_bf16": [-0.4, 0.3], "collapsed": 2}}
    table |= {"tis": row | {"minus_bf16": [-0.4, 0.5]}, "r3": row | {"minus_bf16": None}}
    assert DRAWN["differences"](table) == (
        "The interval of the difference from `bf16` is below 0 for `plain` and above 0 for no arm. "
        "Seeds that collapsed: 2 of 3 with `plain`."
    )


def test_step_times_are_shown_once_they_are_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(DRAWN["times"].__globals__, "RESULTS", tmp_path)
    assert DRAWN["times"]() == []
    sides = {
        "plain": {"seconds": 1.0, "rollout": 0.5, "train": 0.4},
        "exact": {"seconds": 1.3, "rollout": 0.6, "train": 0.6},
    }
    row = {"turns": 3, "ratio_median": 1.31, "ratio_median_interval": [1.1, 1.5], "sides": sides}
    row["largest_gap"] = {"plain": 0.0125, "exact": 0.0}
    written = json.dumps({"commit": "abc", "time": {"dense": row}})
    (tmp_path / "true_on_policy-2026-01-01-time-gpu.json").write_text(written)
    assert "| dense | 3 | 1.00 | 1.30 | 1.31 | 1.10 to 1.50 | 1.20 | 1.50 | 0.013 | 0 |" in DRAWN["times"]()


def test_the_megatron_trainer_and_native_products_are_shown_once_they_are_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(DRAWN["native"].__globals__, "RESULTS", tmp_path)
    assert DRAWN["native"]() == [] and DRAWN["sglang"]("moe") == ["Not measured for `moe`.", ""]
    names = ("batch", "phase", "engine_rounding", "trainer_rounding", "engine_trainer", "engine_exact_trainer")
    names += ("engine_megatron", "megatron_rounding", "megatron_exact_trainer")
    gaps = {name: {"mean": 0.002} for name in names}
    gaps |= {"engine_exact_trainer": {"mean": 0.0, "differing": 0.0}}
    found = {"commit": "abc", "gaps": {"plain": gaps}}
    (tmp_path / "sglang_exact-2026-01-02-moe-megatron.json").write_text(json.dumps(found))
    assert "| `plain` | 0.002 | 0.002 | 0.002 |" in DRAWN["sglang"]("moe")
    measured = {"commit": "abc", "native": {"qwen3": {"bfloat16": [0.03, 0.0]}}}
    (tmp_path / "true_on_policy-2026-01-02-native-gpu.json").write_text(json.dumps(measured))
    assert "| qwen3 | 0.03 | 0 |" in DRAWN["native"]()
