import re
from pathlib import Path

import pytest

from miles_core.config.schema import collect
from miles_core.errors import MismatchError, NonFiniteError
from miles_core.observe.hints import Hints, for_error, hints_of, review
from miles_core.plugin.discovery import discover
from miles_core.plugin.hint import Hint, Remedy, above, detect_fall
from miles_core.plugin.manifest import Plugin
from miles_tools import plugin as tools
from miles_tools.report.report import report

INSTALLED = hints_of(discover().values(), lambda condition: True)


def test_each_hint_speaks_once_per_metric_with_step_and_value():
    hint = Hint("r", "a/*", above(1.0, 1), "{metric} is {value}", "do this")
    records = [{"step": s, "time": 0.0, "a/x": s, "b/x": 9.0} for s in range(4)]
    assert [str(h) for h in review(records, [hint])] == ["step 2: a/x is 2; do this"]


def test_metrics_may_differ_between_steps():
    hint = Hint("r", "a/*", above(1.0, 1), "{metric} is {value}", "do this")
    records = [{"step": 0, "b/x": 9.0}, {"step": 1, "b/x": 9.0, "a/x": 2.0}, {"step": 2}, {"step": 3, "a/y": 3.0}]
    assert [str(h) for h in review(records, [hint])] == ["step 1: a/x is 2; do this", "step 3: a/y is 3; do this"]


def test_missing_metrics_give_no_hint():
    assert review([{"step": s, "something/else": 1e9} for s in range(30)], INSTALLED) == []


@pytest.mark.parametrize(
    ("hint", "records"),
    [
        ("not-finite", [{"train/loss": None}]),
        ("gradient-jump", [{"train/grad_norm": 1.0}] * 21 + [{"train/grad_norm": 100.0}]),
        ("mismatch", [{"mismatch/kl_k3": 0.01}] * 3),
        ("mismatch-of-current", [{"mismatch/current_kl_k3": 0.01}] * 3),
        ("int4-mismatch", [{"mismatch/kl_k3": 0.01}] * 3),
        ("entropy-collapse", [{"rollout/entropy": 1.0}] * 5 + [{"rollout/entropy": 0.01}] * 5),
        ("no-signal", [{"reward/all_equal": 1.0}] * 5),
        ("no-signal", [{"reward/all_equal": 1.0, "train/grad_norm": 0.0}] * 5),
        ("no-gradient", [{"reward/all_equal": 0.2, "train/grad_norm": 0.0}] * 3),
        ("zero-learning-rate", [{"train/lr": 0.0}] * 3),
        ("length-growth", [{"rollout/length_mean": 100.0 * 2**i, "reward/mean": 0.5 - 0.01 * i} for i in range(10)]),
        ("engines-idle", [{"idle/engine-0": 0.9}] * 5),
        ("stale-samples", [{"rollout/staleness_mean": 5.0}] * 5),
        ("truncated", [{"rollout/truncated": 0.5}] * 5),
        ("ids-without-token", [{"rollout/ids_without_token": 0.001}]),
        ("clipped", [{"train/clip_fraction_high": 0.5}] * 5),
        ("reference-drift", [{"train/ref_kl": 2.0}] * 5),
        ("mismatch-jump", [{"mismatch/kl_k3": 1e-5}] * 21 + [{"mismatch/kl_k3": 2e-4}]),
        ("verify-jump", [{"verify/abs_log_prob": 1e-3}] * 4 + [{"verify/abs_log_prob": 0.05}]),
        ("effective-samples", [{"tis/ess": 0.2}] * 3),
        ("weights-at-bound", [{"tis/fraction_truncated_high": 0.2}] * 3),
        ("vetoed", [{"tis/fraction_vetoed": 0.1}] * 3),
        ("low-acceptance", [{"speculative/accept_rate": 0.1}] * 5),
        ("slow-speculation", [{"speculative/speedup": 0.8, "speculative/best_speedup": 1.3}] * 5),
        ("drafts-cannot-pay", [{"speculative/speedup": 0.4, "speculative/best_speedup": 0.9}] * 5),
        ("expert-imbalance", [{"moe/expert_imbalance": 6.0}] * 5),
        ("co-evolution-oscillates", [{"coevolution/one/swing": 0.9}] * 5),
        ("co-evolution-dominance", [{"coevolution/dominance": 0.95}] * 5),
        ("teacher-far", [{"distillation/reverse_kl": 4.0}] * 5),
        ("top-k-mass", [{"distillation/top_k_mass": 0.1}] * 5),
        ("agents-fail", [{"rollout/failed": 0.9}] * 5),
        ("edited-histories", [{"endpoint/branch_edited": 5.0}] * 5),
        ("rewriting-template", [{"endpoint/branch_reasoning": 5.0}] * 5),
        ("failed-episodes", [{"environments/failed_episodes": 0.9}] * 5),
        ("critic-explains-nothing", [{"ppo/explained_variance": -1.0}] * 30),
        ("values-at-clip", [{"train/value_clip_fraction": 0.9}] * 10),
        ("malformed-calls", [{"tools/malformed": 3.0}] * 5),
        ("failed-samples", [{"tools/failed_samples": 0.9}] * 5),
        ("not-exact", [{"mismatch/abs_log_prob": 1e-6}]),
        ("current-tokens-not-exact", [{"mismatch/current_abs_log_prob": 1e-6}]),
        ("experts-drop", [{"moe/dropped_fraction": 0.2}] * 5),
    ],
)
def test_installed_hints(hint, records):
    steps = [{"step": i, **r} for i, r in enumerate(records)]
    assert hint in [advice.hint.name for advice in review(steps, INSTALLED)]


def test_every_hint_is_tested_here():
    tested = {case[0] for mark in test_installed_hints.pytestmark for case in mark.args[1]}
    assert {hint.name for hint in INSTALLED} == tested


def mine(*hints, remedies=()):
    return Plugin("mine", "", "1", ">=0", hints=hints, remedies=remedies)


def test_a_plugins_hint_speaks_where_its_condition_holds():
    plugin = mine(Hint("small", "x", above(1, 1), "x is {value}", "do this", when="rollout.precision == small"))
    steps = [{"step": 1, "x": 2.0}]
    assert [str(a) for a in review(steps, hints_of([plugin], lambda condition: True))] == ["step 1: x is 2; do this"]
    assert review(steps, hints_of([plugin], lambda condition: not condition)) == []


def test_remedies_follow_the_advice_against_their_trouble():
    plugin = mine(remedies=(Remedy("mismatch", "use mine (--plugins mine)", when="not plugin.mine"),))
    known = {hint.name: hint.advice for hint in hints_of([tools, plugin], lambda condition: True)}
    assert known["mismatch"].endswith("(--verify-logprobs); use mine (--plugins mine)")
    assert "mine" not in known["gradient-jump"]
    active = hints_of([tools, plugin], lambda condition: condition != "not plugin.mine")
    assert "mine" not in {hint.name: hint.advice for hint in active}["mismatch"]
    assert "use mine" in for_error(MismatchError(""), hints_of([tools, plugin], lambda condition: True))


def test_conditions_are_about_the_facts_of_the_plan(plan):
    moe, dense, replayed = plan(["tis"]), plan(["tis"], family="llama"), plan(["r3"])
    names = {id(p): {h.name: h.advice for h in hints_of(discover().values(), p.holds)} for p in (moe, dense, replayed)}
    assert "--plugins r3" in names[id(moe)]["mismatch"] and "--plugins tis" not in names[id(moe)]["mismatch"]
    assert not re.search("--plugins (r3|tis)", names[id(dense)]["mismatch"])
    assert "--plugins tis" in names[id(replayed)]["mismatch"] and "r3" not in names[id(replayed)]["mismatch"]
    assert "int4-mismatch" not in names[id(moe)]
    assert not moe.holds("absent.option == 1")


def test_a_run_knows_its_number_format(toy_run):
    run = toy_run(["int4"], rollout_precision="int4", int4_group_size=16, emulate_precision=True, steps=3)
    assert "INT4 weights in the engine differ" in (run.directory / "run.log").read_text()
    assert "INT4 weights in the engine differ" in report(run.directory).read_text()


def test_longer_responses_with_rising_rewards_are_no_trouble():
    steps = [{"step": i, "rollout/length_mean": 100.0 * 2**i, "reward/mean": 0.1 + 0.05 * i} for i in range(10)]
    assert review(steps, INSTALLED) == []


def test_a_solved_task_needs_no_advice():
    steps = [{"step": i, "reward/mean": 0.99, "reward/all_equal": 1.0} for i in range(9)]
    assert review(steps, INSTALLED) == []


def test_history_is_bounded_but_remembers_the_start():
    hints = Hints([Hint("r", "x", detect_fall(0.5, 5), "{value}", "a")], keep=10)
    for _ in range(500):
        assert hints.of({"x": 1.0}) == []
    assert len(hints._history["x"]) <= 30
    assert [h.step for i in range(9) for h in hints.of({"x": 0.1})] == [503]


def test_flags_that_hints_name_exist():
    known = {*collect(discover()).spellings(), "--budget", "--exact"}
    errors = (MemoryError(), NonFiniteError(""), MismatchError(""))
    for text in [*(hint.advice for hint in INSTALLED), *(for_error(error, INSTALLED) for error in errors)]:
        for flag in re.findall(r"--[a-z][a-z0-9-]+", text):
            assert flag in known, f"{flag} in {text!r}"


def test_metrics_that_hints_follow_are_measured_somewhere():
    root = Path(__file__).parents[2]
    files = [f for part in ("miles_core", "miles_embedded", "plugins") for f in (root / part).rglob("*.py")]
    code = "\n".join(f.read_text() for f in files if "tests" not in f.parts and "Hint(" not in f.read_text())
    for hint in INSTALLED:
        last = hint.metric.rpartition("/")[2].removesuffix("*").rstrip("_")
        parts = [last, *last.split("_")] if last.startswith("fraction_") else [last]
        if last.startswith("branch_"):
            parts.append("branch")  # its reason follows in the code
        assert not last or any(re.search(rf"[\"/]{part}[\"_{{]", code) for part in parts if part), (
            f"nobody measures {hint.metric}"
        )


def test_memory_errors():
    class OutOfMemoryError(RuntimeError):
        pass

    advice = for_error(OutOfMemoryError("CUDA out of memory"), ())
    assert all(f in advice for f in ("--micro-batch-size", "--recompute-activations", "--max-running-requests"))
    assert for_error(ValueError(), INSTALLED) is None


def test_equal_rewards_are_no_trouble_where_the_gradient_comes_from_elsewhere():
    records = [{"step": step, "reward/all_equal": 1.0, "train/grad_norm": 13.0} for step in range(6)]
    assert review(records, INSTALLED) == []
