"""A recorded step is repeated bit for bit; the halves of the loop run on each other's data; bad input is one line."""

import fcntl
import json
import shutil

import pytest

from miles_core.errors import MilesError, PlanError
from miles_testing import toy_run
from miles_tools.commands.replay import run as replay
from miles_tools.replay.again import repeat_step
from miles_tools.replay.steps import read_samples, recorded_steps, step_directory

STEPS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run with recorded steps, plugin fields, and a checkpoint of step 2 only."""
    directory = tmp_path_factory.mktemp("recorded") / "run"
    toy_run(["r3"], directory, steps=STEPS, record_steps=True, save_interval=2, num_steps_per_rollout=2)
    return directory


def test_a_step_keeps_every_attribute_and_field(recorded):
    assert recorded_steps(recorded) == [1, 2, 3]
    sample = read_samples(recorded, 1)[0]
    routed = sample.fields["rollout_routed_experts"]
    assert len(routed) == len(sample.tokens) - 1 and sample.weight_versions == [(1, 0)]
    sums = json.loads((step_directory(recorded, 1) / "sums.policy.0.json").read_text())["steps"]
    assert [sorted(step) for step in sums] == [["after", "before", "gradients"], ["after", "gradients"]]
    assert sums[0]["before"] != sums[0]["after"] and sums[0]["after"].keys() == sums[1]["gradients"].keys()


@pytest.mark.parametrize(("step", "start"), [(3, 2), (2, 0)])
def test_a_step_is_repeated_bit_for_bit(recorded, step, start, tmp_path):
    done = repeat_step(recorded, step, tmp_path / "again")
    assert (done.start, done.tolerance, done.difference) == (start, 0.0, None)
    assert all(row[3] for row in done.rows)
    assert {row[0] for row in done.rows} >= {"train/loss", "train/grad_norm", "metrics", "gradients", "weights"}


def test_another_weight_is_found_by_a_replay(recorded, tmp_path, capsys):
    changed = tmp_path / "run"
    shutil.copytree(recorded, changed)
    file = step_directory(changed, 3) / "sums.policy.0.json"
    sums = json.loads(file.read_text())
    name = next(iter(sums["steps"][0]["after"]))
    sums["steps"][0]["after"][name] ^= 1
    file.write_text(json.dumps(sums))
    assert replay([str(changed), "--step", "3"]) == 1
    text = capsys.readouterr().out
    assert f"step 3, optimizer, tensor {name} (1 of" in text and "equal" in text


def test_bad_input_is_one_line_and_changes_nothing(recorded, tmp_path):
    def refused(match, directory=recorded, step=3):
        with pytest.raises(MilesError, match=match) as caught:
            replay([str(directory), "--step", str(step)])
        assert "\n" not in str(caught.value)

    refused(r"step 9 was not recorded; recorded: steps 1 to 3$", step=9)
    refused(r"no such directory; give the directory of a run", tmp_path / "none")
    refused(r"is not a run directory: it has no config\.yaml", tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(recorded, broken)
    samples = step_directory(broken, 3) / "samples.safetensors"
    samples.write_bytes(samples.read_bytes()[:200])
    refused(r"the files of this step are damaged or incomplete", broken)
    shutil.rmtree(broken / "checkpoints")
    shutil.rmtree(step_directory(broken, 1))
    refused(r"step 1 was not recorded.*step 2 cannot be repeated without it", broken, step=2)
    (broken / "steps" / "format.json").write_text('{"format": 2}')
    refused(r"has the format 2, and miles-core \S+ reads up to 1", broken)
    plan = json.loads((broken / "plan.json").read_text())
    (broken / "plan.json").write_text(json.dumps({**plan, "core": "99.0"}))
    refused(r"was written by miles-core 99\.0", broken)
    with (broken / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(r"is writing this run; wait until it has ended", broken)


def test_training_only_on_rollouts_of_a_run_without_training(tmp_path):
    rollouts = toy_run(directory=tmp_path / "rollouts", steps=2, debug_rollout_only=True)
    assert "train/loss" not in rollouts.metrics[0] and recorded_steps(rollouts.directory) == [1, 2]
    assert rollouts.parts[0].policy.trained == 0
    trained = toy_run(
        directory=tmp_path / "trained",
        steps=5,
        debug_train_only=True,
        load_debug_rollout_data=rollouts.directory,
    )
    assert trained.engine is None and [record["step"] for record in trained.metrics] == [1, 2]
    assert all(record["train/grad_norm"] > 0 for record in trained.metrics)
    assert trained.metrics[0]["reward/mean"] == rollouts.metrics[0]["reward/mean"]


def test_flags_without_what_they_need_are_refused(recorded, tmp_path):
    with pytest.raises(PlanError, match="give --load-debug-rollout-data RUN"):
        toy_run(directory=tmp_path / "a", debug_train_only=True)
    with pytest.raises(MilesError, match="load-debug-rollout-data"):
        toy_run(directory=tmp_path / "b", load_debug_rollout_data=recorded)
    with pytest.raises(PlanError, match="evaluation needs an engine"):
        toy_run(
            directory=tmp_path / "c",
            debug_train_only=True,
            load_debug_rollout_data=recorded,
            eval_interval=1,
            eval_prompt_data="x",
        )


def test_old_steps_are_deleted_beyond_the_size_and_repeated_ones_replaced(tmp_path):
    run = toy_run(directory=tmp_path / "run", steps=3, record_steps=True, save_rollouts_size=1, save_interval=1)
    assert recorded_steps(run.directory) == [3]
    toy_run(directory=None, steps=3, save=None, load=run.directory / "checkpoints" / "step_00000002")
    assert recorded_steps(run.directory) == [3]
