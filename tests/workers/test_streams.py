"""Streams of weights that are left before their end: closed at once, and never while the interpreter exits."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.trainer.trainer import EmbeddedTrainer
from miles_testing.doubles import remote
from miles_testing.toy import toy_arguments

#: Fails, or kills the trainer's rank, at the third tensor of a push.
PLUGIN = """
from miles_core.plugin import hookimpl

@hookimpl
def wrap_weights(run):
    def wrap(inner):
        def weights():
            for number, unit in enumerate(inner()):
                if number == 2:
                    strike(run)
                yield unit
        return weights
    return wrap
"""
RAISE = "def strike(run):\n    raise RuntimeError('the push fails')\n"
KILL = """
from miles_testing.doubles import remote

def strike(run):
    flag = run.directory / "killed"
    if run.step == 1 and not flag.exists():
        flag.touch()
        remote.latest().kill("trainer-0")
"""


async def refuse(self, units, version):
    """Fail at the third tensor."""
    for number, _ in enumerate(units):
        if number == 2:
            raise RuntimeError("the push fails")


@pytest.fixture
def streams(monkeypatch):
    """How many of the trainer's streams were opened, and how many ended. No garbage is collected in the meantime."""
    plain, counts = EmbeddedTrainer.units, {"opened": 0, "ended": 0}

    def units(self, everywhere=False):
        counts["opened"] += 1
        try:
            yield from plain(self, everywhere)
        finally:
            counts["ended"] += 1

    monkeypatch.setattr(EmbeddedTrainer, "units", units)
    gc.disable()
    yield counts
    gc.enable()


@pytest.mark.parametrize("where", ["plugin", "engine"])
def test_a_push_that_fails_ends_the_stream_while_its_traceback_is_kept(streams, toy_run, tmp_path, monkeypatch, where):
    (tmp_path / "faults.py").write_text(PLUGIN + RAISE)
    if where == "engine":
        monkeypatch.setattr(EmbeddedEngine, "update_weights", refuse)
    with pytest.raises(RuntimeError, match="the push fails") as kept:
        toy_run([str(tmp_path / "faults.py")] if where == "plugin" else [])
    assert kept.tb is not None and 0 < streams["opened"] == streams["ended"]


def test_a_rank_that_is_killed_in_its_push_ends_the_stream(streams, toy_run, tmp_path):
    (tmp_path / "faults.py").write_text(PLUGIN + KILL)
    options = {"runtime": "remote", "steps": 2, "sync_bucket_size": 1 << 14, "directory": tmp_path / "run"}
    done = toy_run([remote.__file__, str(tmp_path / "faults.py")], **options)
    assert (tmp_path / "run/killed").exists() and done.metrics[-1]["step"] == 2
    assert 0 < streams["opened"] == streams["ended"]


PROGRAM = """
import sys
from miles_core.config.load import load
from miles_core.launch import launch
from miles_core.run.checks import plan_run
from miles_embedded.engine.engine import EmbeddedEngine

async def refuse(self, units, version):
    next(iter(units))
    raise RuntimeError("the push fails")

EmbeddedEngine.update_weights = refuse
config, plan, manifests = plan_run(load(sys.argv[1:]))
try:
    launch(config, plan, manifests)
except RuntimeError as error:
    kept = error  # with its traceback, until the interpreter exits
"""


@pytest.mark.thorough
def test_a_program_that_keeps_the_error_of_its_first_push_exits_as_usual(tmp_path):
    command = [sys.executable, "-c", PROGRAM, *toy_arguments(directory=tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "terminate called" not in done.stderr, done.stderr[-3000:]
    assert "the push fails" in (tmp_path / "run/run.log").read_text()
