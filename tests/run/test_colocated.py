"""Trainer and engine that take turns in one memory."""

from __future__ import annotations

import pytest

from miles_core.plugin import ConfigError
from miles_testing import plan, toy_run
from miles_testing.doubles import remote

#: Gives every parameter memory that can be given back, and writes down what sleeps when a sample is made and when a batch is trained.
WATCH = r"""
import sys
from miles_core.plugin import hookimpl

MODELS = sys.__dict__.setdefault("watched_models", {})  # workers of one process have a copy of this module each

@hookimpl
def on_model(run, model, role):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    MODELS[role] = model

def asleep(role):
    return all(p.untyped_storage().nbytes() == 0 for p in MODELS[role].parameters())

def told(run, when):
    with (run.directory / "asleep").open("a") as file:
        print(when, *(role for role in ("train", "rollout") if asleep(role)), file=file)

@hookimpl
def on_sample(run, sample):
    told(run, "generate")

@hookimpl
def on_batch(run, batch):
    told(run, "train")

@hookimpl
def wrap_weights(run, policy):
    def wrap(inner):
        def units():
            told(run, "push")
            yield from inner()
        return units
    return wrap
"""
#: Kills the only engine and the trainer in the second step's training.
DEATH = """
from miles_core.plugin import hookimpl
from miles_testing.doubles import remote

@hookimpl
def on_batch(run, batch):
    flag = run.directory / "killed"
    if run.step == 1 and not flag.exists():
        flag.touch()
        remote.latest().kill("engine-0")
        remote.latest().kill("trainer-0")
"""
#: BF16, so that masters lie apart; a reference model; passes of the trainer between rollouts; checkpoints.
OPTIONS = {"steps": 2, "save_interval": 1, "dtype": "bfloat16", "kl_loss_coef": 0.1, "verify_logprobs": True}
REMOTE = str(remote.__file__)


@pytest.fixture(scope="module")
def watch(tmp_path_factory):
    path = tmp_path_factory.mktemp("watch") / "watch.py"
    path.write_text(WATCH)
    return str(path)


@pytest.fixture(scope="module")
def both_awake(watch):
    done = toy_run([watch], **OPTIONS)
    assert list_told(done) == {"generate": {""}, "train": {""}, "push": {""}}
    return done


def list_told(done):
    found = {}
    for line in (done.directory / "asleep").read_text().splitlines():
        when, _, who = line.partition(" ")
        found.setdefault(when, set()).add(who)
    return found


def numbers(done):
    return [{k: v for k, v in m.items() if k.split("/")[0] in ("reward", "train", "verify")} for m in done.metrics]


def test_trainer_and_engine_take_turns_and_the_numbers_stay(watch, both_awake):
    done = toy_run([watch], colocate=True, **OPTIONS)
    assert list_told(done) == {"generate": {"train"}, "train": {"rollout", ""}, "push": {""}}
    assert numbers(done) == numbers(both_awake)
    assert done.metrics[-1]["time/colocate"] > 0


def test_workers_in_other_processes_take_turns_too(watch, both_awake):
    done = toy_run([watch, REMOTE], colocate=True, runtime="remote", **OPTIONS)
    # what was sent as bytes cannot shrink on a CPU, so only the engine's side is seen here
    assert list_told(done)["train"] == {"rollout", ""}
    assert numbers(done) == numbers(both_awake)


def test_both_may_die_while_the_engine_sleeps(tmp_path):
    (tmp_path / "faults.py").write_text(DEATH)
    options = {"steps": 3, "save_interval": 1}
    done = toy_run([str(tmp_path / "faults.py"), REMOTE], colocate=True, runtime="remote", **options)
    assert (done.directory / "killed").exists() and remote.latest().restarts.used == 2
    assert numbers(done) == numbers(toy_run(**options))


def test_what_cannot_take_turns_is_refused():
    with pytest.raises(ConfigError, match=r"--colocate.*it needs schedule == sync.*cannot generate while the trainer"):
        plan(colocate=True, schedule="ahead")
