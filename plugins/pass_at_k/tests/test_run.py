"""Evaluations of runs with further metrics; early stopping; plans."""

import json

import pytest

from miles_core.plugin import DataError, PlanError
from miles_testing import plan, toy_run


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
    found = done.metrics[0]
    assert found["eval/set/pass_at_1"] == pytest.approx(found["eval/set/accuracy"])
    assert found["eval/set/pass_at_1"] <= found["eval/set/pass_at_2"] <= found["eval/set/pass_at_4"]
    assert 0 <= found["eval/set/majority_at_3"] <= 1 and found["eval/set/pass_at_2_interval"] > 0
    parts = [found[f"eval/set/kind={kind}/accuracy"] for kind in ("vowel", "other")]
    assert (2 * parts[0] + 3 * parts[1]) / 5 == pytest.approx(found["eval/set/accuracy"])


def test_a_run_that_does_not_improve_stops(held_out):
    done = toy_run(steps=9, lr=None, early_stop_after=2, early_stop_metric="eval/set/accuracy", **held_out)
    assert 2 <= done.run.step < 9 and done.run.stop_requested


def test_a_missing_answer_is_named(held_out):
    with pytest.raises(DataError, match=r"--eval-answer-key final: sample [0-9]+ has no such entry in its metadata"):
        toy_run(steps=1, eval_majority_at="2", eval_answer_key="final", **held_out)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"eval_pass_at": "1,8"}, "evaluation.n_samples >= 8"),
        ({"eval_subset_key": "kind", "eval_answer_key": "x"}, "only majority@k compares answers"),
        ({"eval_subset_key": "kind", "early_stop_metric": "eval/reward"}, "only early stopping reads that metric"),
    ],
)
def test_refused(held_out, options, why):
    with pytest.raises(PlanError) as error:
        plan(**held_out, **options)
    assert why in str(error.value)


def test_metrics_of_evaluations_need_one():
    with pytest.raises(PlanError, match="its metrics are those of evaluations"):
        plan(eval_pass_at="1")
