"""Evaluations of runs with further metrics; early stopping; plans."""

import json

import pytest

from miles_core.plugin import ConfigError, DataError, PlanError
from miles_testing import EvaluationContract, plan, toy_run

METRICS = {"eval_pass_at": "1,2,4", "eval_majority_at": "3", "eval_subset_key": "kind"}


class TestMetrics(EvaluationContract):
    plugins = ("pass_at_k",)
    options = METRICS


@pytest.fixture
def held_out(tmp_path):
    rows = [{"input": letter, "metadata": {"kind": "vowel" if letter in "ae" else "other"}} for letter in "abcde"]
    (tmp_path / "held.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    reward = "async def reward(args, sample):\n    return float(sample.tokens[-1] % 2)\n"
    (tmp_path / "odd.py").write_text(reward)
    return {
        "eval_prompt_data": f"set={tmp_path / 'held.jsonl'}",
        "eval_interval": 1,
        "n_samples_per_eval_prompt": 4,
        "custom_rm_path": tmp_path / "odd.py",
    }


def test_metrics_of_an_evaluation_without_training(held_out):
    done = toy_run(
        num_rollout=None, lr=None, eval_only=True, eval_pass_at="1,2,4", eval_majority_at="3", eval_subset_key="kind",
        **{**held_out, "eval_interval": None},
    )  # fmt: skip
    assert done.run.step == 0 and done.run.policy.trained == 0
    trainer = done.trainer
    assert not trainer.optimizer.masters and not any(p.requires_grad for p in trainer.model.parameters())
    found = done.metrics[0]
    assert found["eval/set/pass_at_1"] == pytest.approx(found["eval/set/accuracy"])
    assert found["eval/set/pass_at_1"] <= found["eval/set/pass_at_2"] <= found["eval/set/pass_at_4"]
    assert 0 <= found["eval/set/majority_at_3"] <= 1 and found["eval/set/pass_at_2_interval"] > 0
    parts = [found[f"eval/set/kind={kind}/accuracy"] for kind in ("vowel", "other")]
    assert (2 * parts[0] + 3 * parts[1]) / 5 == pytest.approx(found["eval/set/accuracy"])


def test_only_evaluating_replaces_the_steps_of_a_training_command(held_out):
    done = toy_run(num_rollout=3, eval_only=True, **{**held_out, "eval_interval": 20})
    assert done.run.step == 0 and "eval/set/accuracy" in done.metrics[0] and len(done.metrics) == 1


def test_a_run_that_does_not_improve_stops(held_out):
    done = toy_run(steps=9, lr=None, early_stop_after=2, early_stop_metric="eval/set/accuracy", **held_out)
    assert 2 <= done.run.step < 9 and done.run.stop_requested


def test_a_missing_answer_is_named(held_out):
    with pytest.raises(DataError, match=r"--eval-answer-key final: sample [0-9]+ has no such entry in its metadata"):
        toy_run(steps=1, eval_majority_at="2", eval_answer_key="final", **held_out)


def test_more_samples_than_were_generated_are_refused(held_out):
    with pytest.raises(PlanError, match=r"evaluation.n_samples >= 8"):
        plan(**held_out, eval_pass_at="1,8")


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"eval_answer_key": "x"}, "pass_at_k.majority_at"),
        ({"early_stop_metric": "eval/reward"}, "pass_at_k.patience"),
        ({"keep_best_mode": "min"}, "pass_at_k.keep_best"),
    ],
)
def test_options_without_effect_are_refused(held_out, options, needs):
    with pytest.raises(ConfigError, match=f"it needs {needs}, and .*otherwise it has no effect"):
        plan(**held_out, eval_subset_key="kind", **options)


@pytest.mark.parametrize(
    "option", ["eval_pass_at", "eval_majority_at", "eval_subset_key", "early_stop_after", "keep_best"]
)
def test_metrics_of_evaluations_need_one(option):
    with pytest.raises(ConfigError, match=r"it needs evaluation.prompt_data, and --eval-prompt-data is none"):
        plan(**{option: "1"})


#: Rewards of the evaluation after each step: the second is the best.
SCRIPTED = """
from miles_core.plugin import hookimpl

VALUES = {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.6}

@hookimpl
def on_evaluation(run, metrics):
    metrics["eval/set/score"] = VALUES.get(run.policy.version, 5.0)
"""


@pytest.fixture
def scripted(held_out, tmp_path):
    (tmp_path / "scripted.py").write_text(SCRIPTED)
    both = [str(tmp_path / "scripted.py"), "pass_at_k"]
    return {
        **held_out,
        "plugins": both,
        "save_interval": 1,
        "keep_best": "eval/set/score",
        "n_samples_per_eval_prompt": 1,
    }


def steps_in(directory):
    return sorted(int(p.name[5:]) for p in directory.glob("step_*")) if directory.is_dir() else []


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_checkpoint_survives_and_is_resumed(scripted, tmp_path, mode):
    run, best = tmp_path / "run", {"max": 2, "min": 1}[mode]
    done = toy_run(directory=run, steps=3, keep=1, keep_best_mode=mode, **scripted)
    assert steps_in(run / "checkpoints") == [3] and steps_in(run / "best") == [best]
    assert [m.get("pass_at_k/best_step") for m in done.metrics if m["step"]] == {"max": [1, 2, 2], "min": [1, 1, 1]}[
        mode
    ]
    more = toy_run(directory=None, save=None, load=run, steps=4, keep=1, keep_best_mode=mode, **scripted)
    assert steps_in(run / "best") == [best] and more.metrics[-1]["pass_at_k/best_step"] == best  # 0.6 is not better
    again = toy_run(directory=tmp_path / "other", load=run / "best", steps=best + 1, keep_best_mode=mode, **scripted)
    assert again.run.step == best + 1 and again.metrics[-1]["step"] == best + 1
    assert steps_in(tmp_path / "other/best") == [best]  # carried over from the run that it continues


def test_a_branch_drops_the_best_of_the_one_it_leaves(scripted, tmp_path):
    run = tmp_path / "run"
    toy_run(directory=run, steps=2, **scripted)
    assert steps_in(run / "best") == [2]
    again = toy_run(directory=None, save=None, load=run / "checkpoints/step_00000001", steps=3, **scripted)
    assert steps_in(run / "best") == [2] and again.metrics[-1]["pass_at_k/best"] == 0.9
    state = (run / "best/step_00000002/manifest.json").stat().st_ino
    assert (
        state == (run / "checkpoints/step_00000002/manifest.json").stat().st_ino
    )  # of this branch, without further space


def test_early_stopping_continues_after_a_resume(scripted, tmp_path):
    options = {**scripted, "keep_best": None, "early_stop_after": 2, "early_stop_metric": "eval/set/score"}
    (tmp_path / "scripted.py").write_text(SCRIPTED.replace("5.0", "0.1"))
    whole = toy_run(steps=9, **options)
    assert whole.run.step == 4  # the best is step 2
    toy_run(directory=tmp_path / "run", steps=3, **options)
    again = toy_run(directory=None, save=None, load=tmp_path / "run", steps=9, **options)
    assert again.run.step == 4 and again.run.stop_requested


@pytest.mark.parametrize("flag", ["keep_best", "early_stop_metric"])
def test_a_metric_that_no_evaluation_reports_is_refused(scripted, flag):
    options = {**scripted, "early_stop_after": 1} | {flag: "eval/scor"}
    with pytest.raises(ConfigError, match=r"eval/scor: evaluations report .*eval/set/score"):
        toy_run(steps=1, **options)


@pytest.mark.parametrize("options", [{}, {"save_interval": 2}])
def test_best_checkpoints_that_cannot_be_kept(held_out, options):
    with pytest.raises(PlanError, match="a --save-interval that divides it"):
        plan(**held_out, keep_best="eval/accuracy", **options)
