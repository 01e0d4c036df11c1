"""A recorded step is repeated bit for bit; the halves of the loop run on each other's data; bad input is one line."""

import errno
import fcntl
import json
import shutil

import pytest
import torch

from miles_core.errors import MilesError, PlanError
from miles_testing import toy_run
from miles_testing.doubles import remote
from miles_tools.commands.replay import run as replay
from miles_tools.replay import steps
from miles_tools.replay.again import repeat_step
from miles_tools.replay.compare import find_difference, list_differences
from miles_tools.replay.steps import measure_steps, read_samples, recorded_steps, step_directory
from miles_tools.replay.stored_run import StoredRun

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
    replayed = StoredRun(tmp_path / "again").metrics[step]
    assert "r3/tokens_differing" in replayed, "the routes of the record are replayed"


def test_a_step_is_repeated_with_the_threads_of_the_run(recorded, tmp_path):
    before = torch.get_num_threads()
    trained = StoredRun(recorded).threads(3)
    assert trained == before
    torch.set_num_threads(before + 1)
    try:
        repeat_step(recorded, 3, tmp_path / "again")
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert StoredRun(tmp_path / "again").threads(3) == trained


def test_other_threads_are_listed(recorded, tmp_path):
    changed = tmp_path / "run"
    shutil.copytree(recorded, changed)
    file = step_directory(changed, 1) / "sums.policy.0.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"threads": 77}))
    listed = list_differences(StoredRun(recorded), StoredRun(changed))
    assert listed == [("threads", str(torch.get_num_threads()), "77")]


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


def test_workers_record_what_one_process_records(recorded, tmp_path):
    directory = tmp_path / "run"
    options = {"steps": STEPS, "record_steps": True, "save_interval": 2, "num_steps_per_rollout": 2}
    toy_run(["r3", remote.__file__], directory, runtime="remote", rollout_workers=2, **options)
    assert find_difference(StoredRun(recorded), StoredRun(directory)) is None
    assert repeat_step(directory, 3, tmp_path / "again").difference is None


def test_a_repeated_step_sends_no_metrics_elsewhere(recorded, tmp_path):
    changed = tmp_path / "run"
    shutil.copytree(recorded, changed)
    config = changed / "config.yaml"
    config.write_text(config.read_text().replace("use_tensorboard: false", "use_tensorboard: true"))
    assert "use_tensorboard: true" in config.read_text()
    repeat_step(changed, 3, tmp_path / "again")
    assert (
        not (tmp_path / "again" / "tensorboard").exists()
        and "use_tensorboard: true" not in (tmp_path / "again" / "config.yaml").read_text()
    )


def test_bad_input_is_one_line_and_changes_nothing(recorded, tmp_path):
    def refused(match, directory=recorded, step=3):
        before = {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}
        with pytest.raises(MilesError, match=match) as caught:
            replay([str(directory), "--step", str(step)])
        assert "\n" not in str(caught.value)
        assert before == {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}

    refused(r"step 9 was not recorded; recorded: steps 1 to 3$", step=9)
    refused(r"no such directory; give a run directory", tmp_path / "none")
    refused(r"is not a run directory: it has neither metrics\.jsonl, plan", tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(recorded, broken)
    config = broken / "config.yaml"
    whole = config.read_text()
    config.unlink()
    refused(r"is not a run directory: it has no config\.yaml", broken)
    config.write_text(whole[: whole.index("\ndefaults:")])
    refused(r"config\.yaml is incomplete: it ends before the defaults; restore it$", broken)
    config.write_text(whole)
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
    (broken / "plan.json").write_text(json.dumps(plan))
    with (broken / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(r"is writing this run; wait until it has ended", broken)
    shutil.rmtree(broken / "steps")
    refused(r"this run recorded no step; record steps with --record-steps$", broken)


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
        toy_run(directory=tmp_path / "a", load_debug_rollout_data=recorded)
    with pytest.raises(PlanError, match="only for --save-rollouts"):
        toy_run(directory=tmp_path / "a", record_steps=True, save_rollouts=False)
    only = {"directory": tmp_path / "a", "debug_train_only": True}
    with pytest.raises(PlanError, match="evaluation needs an engine"):
        toy_run(**only, load_debug_rollout_data=recorded, eval_interval=1, eval_prompt_data="x")
    with pytest.raises(MilesError, match=r"^--load-debug-rollout-data \S+: \S+: no such directory"):
        toy_run(**only, load_debug_rollout_data=tmp_path / "none")
    with pytest.raises(MilesError, match=r"^--load-debug-rollout-data \S+: \S+: step 7 was not recorded"):
        toy_run(**only, load_debug_rollout_data=recorded, debug_last_step=7)
    assert not (tmp_path / "a").exists()


def test_old_steps_are_deleted_beyond_the_size(tmp_path):
    run = toy_run(directory=tmp_path / "run", steps=3, record_steps=True, save_rollouts_size=1)
    assert recorded_steps(run.directory) == [3] and [*measure_steps(run.directory)] == [3]


def test_a_resumed_run_replaces_the_steps_that_it_repeats(recorded, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(recorded, directory)
    load = directory / "checkpoints" / "step_00000002"
    toy_run(["r3"], directory=None, steps=STEPS, save=None, load=load, record_steps=True, num_steps_per_rollout=2)
    assert find_difference(StoredRun(recorded), StoredRun(directory)) is None
    toy_run(["r3"], directory=None, steps=STEPS, save=None, load=load, num_steps_per_rollout=2)
    assert recorded_steps(directory) == [1, 2]


def test_a_full_disk_names_the_step(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(steps, "_write_json", fail)
    with pytest.raises(
        MilesError, match=r"^cannot record step \d in \S+: No space left on device; free space"
    ) as caught:
        toy_run(directory=tmp_path / "run", steps=1, record_steps=True)
    assert "\n" not in str(caught.value)
