"""One step ahead: exactly one version old, the same numbers every time, also from a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from miles_core.errors import DataError
from miles_core.mismatch.budget import BUDGET_FILE, STALE

STEPS = 4
OPTIONS = {"schedule": "ahead", "rollout_shuffle": True, "rollout_max_response_len": 6}


def numbers(metrics):
    return [{n: v for n, v in m.items() if not n.startswith("time") and "second" not in n} for m in metrics]


def weights(directory):
    return load_file(directory / f"checkpoints/step_{STEPS:08d}/policy/trainer/model.safetensors")


def test_every_step_but_the_first_trains_on_samples_of_the_version_before(watched):
    run = watched(steps=STEPS, **OPTIONS)
    assert [m["rollout/staleness_mean"] for m in run.metrics] == [0, 1, 1, 1]
    assert [m["rollout/staleness_max"] for m in run.metrics] == [0, 1, 1, 1]
    assert [m["rollout/stale_tokens"] for m in run.metrics] == [0, 1, 1, 1]
    for step, batch in enumerate(run.run.state["trained"]):
        versions = {v for index in batch for _, v in run.run.state["samples"][index].weight_versions}
        assert versions == {max(step - 1, 0)}


def test_the_first_step_is_that_of_sync(toy_run):
    sync, ahead = toy_run(steps=1), toy_run(steps=1, schedule="ahead")
    extra = {n for n in ahead.metrics[0] if n not in sync.metrics[0]}
    of_current_weights = {f"mismatch/current_{name}" for name in ("kl_k3", "abs_log_prob", "abs_log_prob_max")}
    assert extra == {"rollout/staleness_mean", "rollout/staleness_max", "rollout/stale_tokens", *of_current_weights}
    (one,), (two,) = numbers(sync.metrics), numbers(ahead.metrics)
    assert {n: v for n, v in two.items() if n not in extra} == one


@pytest.mark.parametrize(
    ("plugins", "more"),
    [([], {}), (["r3", "tis"], {"r3_buffer_size": 3})],
    ids=["bare", "r3+tis"],
)
def test_a_checkpoint_holds_the_step_that_is_ahead(toy_run, tmp_path, plugins, more):
    first = toy_run(plugins, directory=tmp_path / "whole", steps=STEPS, save_interval=2, **OPTIONS, **more)
    state = json.loads((tmp_path / "whole/checkpoints/step_00000002/state/run.json").read_text())["data"]
    assert len(state["held"]) == len(state["next"]) == 2 and state["prompts"]["waiting"] == []
    load = tmp_path / "whole/checkpoints/step_00000002"
    again = toy_run(plugins, directory=tmp_path / "again", steps=STEPS, load=load, **OPTIONS, **more)
    spilled = "r3/records_spilled"  # what is loaded from a checkpoint is in memory
    assert [{n: v for n, v in m.items() if n != spilled} for m in numbers(again.metrics)] == [
        {n: v for n, v in m.items() if n != spilled} for m in numbers(first.metrics[2:])
    ]
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "again")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_another_schedule_goes_on_from_its_checkpoint(toy_run, tmp_path, schedule):
    toy_run(directory=tmp_path / "run", steps=STEPS, save_interval=2, **OPTIONS)
    load = tmp_path / "run/checkpoints/step_00000002"
    again = toy_run(directory=tmp_path / "again", steps=STEPS, load=load, **{**OPTIONS, "schedule": schedule})
    assert [m["step"] for m in again.metrics] == [3, 4]
    state = json.loads((tmp_path / "again/checkpoints/step_00000004/state/run.json").read_text())["data"]
    assert state["prompts"]["waiting"] == [] and (state["prompts"]["source"]["epoch"], "held" in state) == (1, False)


def test_evaluation_runs_beside_and_is_recorded_under_the_step_it_scored(toy_run, tmp_path):
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text('{"input": "z"}\n{"input": "y"}\n')
    options = {"steps": 3, "eval_interval": 2, "eval_prompt_data": held_out, "n_samples_per_eval_prompt": 2}
    sync = {r["step"]: r for r in toy_run(lr=0.0, **options).metrics if "eval/reward" in r}
    run = toy_run(lr=0.0, schedule="ahead", **options)
    found = {r["step"]: r for r in run.metrics if "eval/reward" in r}
    assert list(found) == list(sync) == [0, 2, 3]
    for step, record in found.items():
        assert record["eval/reward"] == sync[step]["eval/reward"] and record["time/evaluation"] > 0
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 3]  # each in a record of its own, before the next step's


def test_a_group_that_fails_ahead_of_time_ends_the_run_with_its_error(toy_run, tmp_path):
    (tmp_path / "reward.py").write_text(
        "async def reward(args, sample):\n    if sample.group_index == 5:\n        return None\n    return sample.index % 3\n"
    )
    with pytest.raises(DataError, match=r"sample 2\d"):
        toy_run(schedule="ahead", steps=STEPS, custom_rm_path=tmp_path / "reward.py")


def test_a_filter_and_over_sampling_work_ahead(toy_run):
    run = toy_run(schedule="ahead", steps=STEPS, over_sampling_batch_size=4, dynamic_sampling_filter_path="nonzero_std")
    assert [m["rollout/samples"] for m in run.metrics] == [8] * STEPS
    assert not run.engine.rows


def test_the_budget_charges_staleness_with_what_one_version_makes(toy_run):
    run = toy_run(schedule="ahead", steps=2, lr=1e-2, verify_logprobs=True)
    found = json.loads((run.directory / BUDGET_FILE).read_text())["policy"]
    shares = {cause["name"]: cause["share"] for cause in found["causes"] if not cause["why"]}
    assert found["version"] == 1 and shares[STALE] == pytest.approx(1, abs=0.01)
    fresh = toy_run(steps=2, lr=1e-2, verify_logprobs=True)
    assert json.loads((fresh.directory / BUDGET_FILE).read_text())["policy"]["total"]["mean_abs"] < 1e-4
