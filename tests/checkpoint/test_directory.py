import errno
import hashlib
import json
import os
import shutil

import pytest
from safetensors import SafetensorError

from miles_core.checkpoint import directory
from miles_core.checkpoint.digest import CHUNK, digest_files
from miles_core.checkpoint.directory import (
    Checkpoints,
    changes,
    check_files,
    checkpoint_step,
    compare_plans,
    locate_checkpoint,
    seal,
)
from miles_core.errors import CheckpointError


def save(checkpoints, step, text="weights", plan=None):
    with checkpoints.save(step, plan=plan) as directory:
        (directory / "policy").mkdir()
        (directory / "policy" / "model.txt").write_text(text)


def test_saved_directory_is_complete_and_latest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "ckpt")
    assert checkpoints.find_latest() is None
    save(checkpoints, 2)
    save(checkpoints, 12, "newer")
    assert checkpoints.steps() == [2, 12]
    assert checkpoint_step(checkpoints.path(2)) == 2
    assert checkpoints.load() == checkpoints.path(12) == tmp_path / "ckpt" / "step_00000012"
    assert (checkpoints.load(2) / "policy" / "model.txt").read_text() == "weights"
    manifest = check_files(checkpoints.path(12))
    assert manifest["step"] == 12
    assert manifest["files"]["policy/model.txt"].size == len("newer")


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 5, "first")
    save(checkpoints, 5, "second")
    assert (checkpoints.load(5) / "policy/model.txt").read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]


def test_failure_inside_a_save_leaves_nothing_and_keeps_the_error(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    with pytest.raises(ZeroDivisionError), checkpoints.save(2) as directory:
        (directory / "half.txt").write_text("x")
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    checkpoints.load()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_while_writing_says_bytes_and_keeps_earlier(tmp_path, error):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, "x" * 1000)
    with (
        pytest.raises(
            CheckpointError, match=r"disk is full: saving step 2 .*an earlier checkpoint has 1,\d\d\d bytes"
        ) as caught,
        checkpoints.save(2) as directory,
    ):
        (directory / "part.bin").write_bytes(b"x" * 10)
        raise error
    assert "failed after 10 bytes" in str(caught.value)
    assert "the 1 earlier checkpoints there are untouched" in str(caught.value)
    assert checkpoints.steps() == [1]
    assert not list(tmp_path.glob(".*"))
    checkpoints.load(1)


def test_full_disk_when_flushing_or_renaming(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="disk is full"):
            save(checkpoints, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(CheckpointError, match="disk is full"):
            save(checkpoints, 1, "again")
    assert checkpoints.steps() == [1]
    assert (checkpoints.load(1) / "policy/model.txt").read_text() == "weights"


def test_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot save step 1 in"):
        save(Checkpoints(tmp_path / "file" / "ckpt"), 1)


def test_looking_at_checkpoints_changes_nothing_that_somebody_else_is_writing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 5)
    checkpoints.path(5).rename(tmp_path / ".step_00000005.replaced")  # another process is about to put the new one here
    assert checkpoints.steps() == [] and (tmp_path / ".step_00000005.replaced").exists()


def test_only_the_last_are_kept_and_what_a_crash_left_of_the_others_goes(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 10, 11):
        save(checkpoints, step)
    checkpoints.keep(2)
    assert checkpoints.steps() == [10, 11] and len(list(tmp_path.iterdir())) == 2
    checkpoints.path(10).rename(tmp_path / ".step_00000010.dropped")
    checkpoints.recover()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000011"]


@pytest.mark.parametrize("done", [0, 1, 2])
def test_crash_at_any_point_of_a_replacement_leaves_one_good_checkpoint(tmp_path, done):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 5, "old")
    work = tmp_path / ".step_00000005.saving"
    save(Checkpoints(tmp_path / "other"), 5, "new")
    shutil.move(tmp_path / "other" / "step_00000005", work)
    final, aside = checkpoints.path(5), tmp_path / ".step_00000005.replaced"
    for old, new in ((final, aside), (work, final))[:done]:
        old.rename(new)
    checkpoints.recover()
    text = (Checkpoints(tmp_path).load() / "policy/model.txt").read_text()
    assert text == ("new" if done == 2 else "old")
    save(checkpoints, 6)
    assert not aside.exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.unlink(), "model.txt is missing"),
        (lambda f: f.write_text("weigh"), "model.txt has 5 bytes, 7 were saved"),
        (lambda f: f.write_text("WEIGHTS"), "contents of policy/model.txt changed"),
    ],
)
def test_damaged_file_is_named(tmp_path, damage, message):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)
    damage(checkpoints.path(3) / "policy" / "model.txt")
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 1}', '{"format": 1, "files": {"a": 3}}', '{"format": 1, "files": {}}', "[" * 100_000],
)
def test_damaged_manifest(tmp_path, text):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)
    (checkpoints.path(3) / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        checkpoints.load()


def test_missing_manifest_other_format_missing_step(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="it has none"):
        checkpoints.load()
    save(checkpoints, 3)
    with pytest.raises(CheckpointError, match=r"step 4 was requested .* it has steps 3"):
        checkpoints.load(4)
    file = checkpoints.path(3) / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoints.load()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json"):
        checkpoints.load()


def plan(**facts):
    version = facts.pop("tis", "0.1")
    return {
        "digest": json.dumps([version, facts], sort_keys=True),
        "core": "0.1.0",
        "plugins": [{"name": "tis", "version": version}],
        "sets": [{"path": "rollout.top_p", "value": 1.0, "plugin": "tis"}],
        "consulted": ["model.moe"],
        "facts": [
            {"name": k.replace("__", "."), "value": v, "origin": "test", "state": "KNOWN"} for k, v in facts.items()
        ],
    }


def test_a_plan_of_another_layout_is_damage_and_an_empty_directory_is_no_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3, plan=plan())
    checkpoints.path(9).mkdir()
    assert checkpoints.load(plan=plan()) == checkpoints.path(3)
    save(checkpoints, 4, plan={"plugins": [{"title": "tis"}]})
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged \(KeyError\('name'\)\)"):
        checkpoints.load(plan=plan())


def test_other_plan_is_refused_only_on_what_matters(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    saved = plan(model__layers=2)
    save(checkpoints, 1, plan=saved)
    newer = plan(model__layers=2, tis="0.2")
    assert list(map(str, changes(checkpoints.load(plan=newer), newer))) == ["plugin tis was 0.1, is now 0.2"]
    with pytest.raises(CheckpointError, match=r"model\.layers was 2, is now 3"):
        checkpoints.load(plan=plan(model__layers=3))
    save(checkpoints, 2)
    with pytest.raises(CheckpointError, match="records no plan"):
        checkpoints.load(plan=saved)


def test_options_are_compared_and_a_fixed_one_must_not_change():
    def with_option(value, fixed):
        fact = {"name": "mine.size", "value": value, "state": "KNOWN", "flag": "--mine-size", "fixed": fixed}
        return {**plan(), "facts": [fact]}

    (told,) = compare_plans(with_option(32, False), with_option(128, False))
    assert str(told) == "mine.size was 32, is now 128" and not told.fatal
    assert compare_plans(with_option(32, True), with_option(128, True))[0].fatal


def test_an_option_that_moved_to_another_table_is_compared_by_its_flag():
    def with_option(name, value):
        fact = {"name": name, "value": value, "state": "KNOWN", "flag": "--mine-size", "fixed": True}
        return {**plan(), "facts": [fact, {**fact, "name": "yours.size"}]}  # a flag of two options

    assert compare_plans(with_option("size", 32), with_option("mine.size", 32)) == []
    assert compare_plans(with_option("size", 32), with_option("mine.size", 64))[0].fatal


def test_plans_are_compared_by_what_matters():
    saved = plan(model__moe=True, train__precision="bf16", train__lr=0.1)
    assert compare_plans(saved, saved) == []
    assert compare_plans(saved, plan(model__moe=True, train__precision="bf16", train__lr=0.2)) == []
    told = compare_plans(saved, plan(model__moe=False, train__precision="bf16", tis="0.2"))
    assert [(d.name, d.saved, d.current, d.fatal) for d in told] == [
        ("plugin tis", "0.1", "0.2", False),
        ("model.moe", True, False, False),
    ]
    (fatal,) = compare_plans(saved, plan(model__moe=True, train__precision="e4m3"))
    assert fatal.fatal
    assert str(fatal) == "train.precision was bf16, is now e4m3"


def test_load_means_a_run_a_checkpoint_directory_or_a_step(tmp_path):
    (tmp_path / "run").mkdir()
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    for step in (4, 8):
        save(checkpoints, step)
    assert locate_checkpoint(tmp_path / "run") == checkpoints.path(8)
    assert locate_checkpoint(tmp_path / "run" / "checkpoints") == checkpoints.path(8)
    assert locate_checkpoint(checkpoints.path(4)) == checkpoints.path(4)
    with pytest.raises(CheckpointError, match=r"--load .*nowhere: no such directory"):
        locate_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="it has none"):
        locate_checkpoint(tmp_path / "empty")


def test_checkpoints_with_plain_digests_can_be_loaded(tmp_path):
    """Format 1: the digest of a file is the hash of its contents."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)
    path = checkpoints.path(3)
    manifest = json.loads((path / "manifest.json").read_text())
    entry = {"size": 7, "blake2b": hashlib.blake2b(b"weights", digest_size=32).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 1, "files": {"policy/model.txt": entry}}))
    assert checkpoints.load(3) == path
    (path / "policy" / "model.txt").write_text("WEIGHTS")
    with pytest.raises(CheckpointError, match=r"contents of policy/model\.txt changed"):
        checkpoints.load(3)


def test_digests_that_writers_recorded_are_taken_over(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.save(3) as work:
        (work / "model.txt").write_text("weights")
        (work / "other.txt").write_text("other")
        recorded = digest_files({work / "model.txt": CHUNK})[work / "model.txt"]
        hashed = []
        monkeypatch.setattr(directory, "digest_files", lambda files: hashed.extend(files) or digest_files(files))
        seal(work, 3, None, {"model.txt": recorded})
    assert [file.name for file in hashed] == ["other.txt"]
    monkeypatch.undo()
    assert checkpoints.load(3) == checkpoints.path(3)
