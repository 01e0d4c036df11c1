"""One run a directory, one process at a time, nothing left by a start that is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.config.load import load
from miles_core.errors import ConfigError, MilesError
from miles_core.run.directory import claim_directory, refuse_to_overwrite, refuse_unusable_run, refuse_unwritable
from miles_core.run.ending import Ending

HOLDER = """
import os, sys, time
from miles_core.config.load import load
from miles_core.run.directory import claim_directory
with claim_directory(load(["--save", sys.argv[1]], manifests=[])):
    print("held", flush=True)
    time.sleep(60)
"""


def config(directory, *words):
    return load(["--save", str(directory), *words], manifests=[])


def test_a_second_writer_is_refused_until_the_first_is_gone_even_by_kill(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        with (
            pytest.raises(ConfigError, match=f"process {process.pid} on .* is writing this run"),
            claim_directory(config(tmp_path / "run")),
        ):
            pass
    finally:
        process.kill()
        process.wait()
    with claim_directory(config(tmp_path / "run")) as directory:
        assert directory == tmp_path / "run"


def test_no_user_is_advised_to_delete_a_run_that_another_process_writes(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        (run / "metrics.jsonl").write_text('{"step": 1}\n')
        (run / "config.yaml").write_text("")
        for check, options in (
            (refuse_to_overwrite, config(run)),
            (refuse_unusable_run, load(["--load", str(run)], manifests=[])),
        ):
            with pytest.raises(ConfigError, match=f"process {process.pid} on .* is writing this run; wait"):
                check(options)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ConfigError, match=r"already holds the metrics of a run without a checkpoint; .* delete it"):
        refuse_to_overwrite(config(run))


def test_a_refused_start_leaves_no_directory(tmp_path, toy_run):
    with pytest.raises(MilesError, match="there is no prompt file"):
        toy_run(directory=tmp_path / "new/run", prompt_data=tmp_path / "none.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_there_and_what_is_in_it_stay(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(RuntimeError), claim_directory(config(tmp_path / "run")):
        raise RuntimeError
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"notes.txt"}


def test_a_directory_that_cannot_be_made_is_refused_before_a_run(tmp_path):
    refuse_unwritable("--export-hf x", tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for target, words in (
        ("/proc/x", "/proc cannot be written"),
        (tmp_path / "loop/x", "levels"),
        (tmp_path / "file/x", "Not a dir"),
    ):
        with pytest.raises(ConfigError, match=f"--export-hf x: .*{words}.*choose another directory"):
            refuse_unwritable("--export-hf x", Path(target))


def test_the_last_lines_can_be_typed():
    lines = Ending(
        why="finished", step=2, of=2, directory="run with späce", checkpoint="checkpoints/step_00000002"
    ).lines()
    assert lines[2:] == [
        "report: miles report 'run with späce'",
        "to continue: miles train --load 'run with späce' --num-rollout N",
    ]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (0, "run the same command to start again"),
        (2, "delete the directory, or choose another one with --save, to start"),
    ],
)
def test_a_run_without_a_checkpoint_says_how_to_start_again(step, words, tmp_path):
    """``--save`` refuses a directory with the metrics of a step."""
    assert words in Ending(why="ended", step=step, of=3, directory=str(tmp_path)).lines()[1]


def test_a_run_whose_directory_is_gone_does_not_advise_to_delete_it(tmp_path):
    lines = Ending(why="ended", step=2, of=3, directory=str(tmp_path / "gone")).lines()
    assert lines[1].startswith("checkpoint: unknown: the run's directory is gone")


def _claim(directory):
    from types import SimpleNamespace

    from miles_core.run.directory import claim_directory

    config = SimpleNamespace(run=SimpleNamespace(save=str(directory), load=None), model=SimpleNamespace())
    with claim_directory(config):
        pass


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "config.yaml",
        "run.log",
        "metrics.jsonl",
        "plan.json",
        "ending.json",
        "workers/engine-0.log",
        "checkpoints",
    ],
)
@pytest.mark.parametrize("kind", ["symbolic link", "neither a file"])
def test_a_prepared_directory_is_refused_and_what_it_points_to_stays(tmp_path, name, kind):
    import os

    victim, place = tmp_path / "victim", tmp_path / "run" / name
    victim.write_text("precious")
    place.parent.mkdir(parents=True)
    place.symlink_to(victim) if kind == "symbolic link" else os.mkfifo(place)
    with pytest.raises(ConfigError, match=rf"--save .*{name} is (a {kind}|{kind})"):
        _claim(tmp_path / "run")
    assert victim.read_text() == "precious"


def test_hard_links_are_refused_and_links_within_a_run_are_not(tmp_path):
    import os

    (tmp_path / "run" / "wandb" / "run-1").mkdir(parents=True)
    (tmp_path / "run" / "wandb" / "latest-run").symlink_to("run-1")
    _claim(tmp_path / "run")
    (tmp_path / "victim").write_text("precious")
    os.link(tmp_path / "victim", tmp_path / "run" / "run.log")
    with pytest.raises(ConfigError, match=r"run\.log is a hard link"):
        _claim(tmp_path / "run")
