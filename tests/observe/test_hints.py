import math
import re

import pytest

from miles_core.config.schema import collect
from miles_core.observe.hints import RULES, Hints, Rule, above, below, fell, for_error, jumped, not_finite, review


@pytest.mark.parametrize(
    ("condition", "no", "yes"),
    [
        (not_finite(), [1.0, 2.0], [1.0, math.nan]),
        (above(1.0, 2), [3.0], [0.0, 1.5, 1.5]),
        (below(1.0, 2), [0.0, 3.0], [5.0, 0.5, 0.5]),
        (jumped(10, 3), [1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 1.0, 11.0]),
        (jumped(10, 3), [11.0], [-1.0, -1.0, -1.0, 11.0]),
        (fell(0.5, 2), [1.0, 1.0, 0.6, 0.6], [1.0, 1.0, 0.4, 0.4]),
    ],
)
def test_conditions(condition, no, yes):
    assert not condition(no)
    assert condition(yes)


def test_each_rule_speaks_once_per_metric_with_step_and_value():
    rule = Rule("r", "a/*", above(1.0, 1), "{metric} is {value}", "do this")
    records = [{"step": s, "time": 0.0, "a/x": s, "b/x": 9.0} for s in range(4)]
    assert [str(h) for h in review(records, [rule])] == ["step 2: a/x is 2; do this"]


def test_missing_metrics_give_no_hint():
    assert review([{"step": s, "something/else": 1e9} for s in range(30)]) == []


@pytest.mark.parametrize(
    ("rule", "records"),
    [
        ("not-finite", [{"train/loss": None}]),
        ("gradient-jump", [{"train/grad_norm": 1.0}] * 21 + [{"train/grad_norm": 100.0}]),
        ("mismatch", [{"mismatch/kl_k3": 0.01}] * 3),
        ("entropy-collapse", [{"train/entropy": 1.0}] * 5 + [{"train/entropy": 0.01}] * 5),
        ("no-signal", [{"reward/all_equal": 1.0}] * 5),
        ("truncated", [{"rollout/truncated": 0.5}] * 5),
        ("clipped", [{"train/clip_fraction_high": 0.5}] * 5),
        ("reference-drift", [{"train/ref_kl": 2.0}] * 5),
        ("expert-imbalance", [{"moe/expert_imbalance": 6.0}] * 5),
    ],
)
def test_core_rules(rule, records):
    steps = [{"step": i, **r} for i, r in enumerate(records)]
    assert [h.rule.name for h in review(steps)] == [rule]


def test_a_solved_task_needs_no_advice():
    steps = [{"step": i, "reward/mean": 0.99, "reward/all_equal": 1.0} for i in range(9)]
    assert review(steps) == []


def test_history_is_bounded_but_remembers_the_start():
    hints = Hints([Rule("r", "x", fell(0.5, 5), "{value}", "a")], keep=10)
    for _ in range(500):
        assert hints.of({"x": 1.0}) == []
    assert len(hints._history["x"]) <= 30
    assert [h.step for i in range(9) for h in hints.of({"x": 0.1})] == [503]


def test_flags_that_hints_name_exist():
    known = collect([]).spellings()
    for text in [*(r.advice for r in RULES), for_error(MemoryError())]:
        for flag in re.findall(r"--[a-z][a-z0-9-]+", text):
            assert flag in known, f"{flag} in {text!r}"


def test_memory_errors():
    class OutOfMemoryError(RuntimeError):
        pass

    assert "--micro-batch-size" in for_error(OutOfMemoryError("CUDA out of memory"))
    assert for_error(ValueError()) is None
