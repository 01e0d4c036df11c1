"""Workers that are killed in every phase of a real run of the loop; they live in this process and may not share its objects."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter

import pytest

from miles_core.errors import PlanError, WorkerLost
from miles_testing.doubles import remote

#: Kills workers (moment, step, name) once each, and writes which prompts the trainer was given, where nothing rolls it back.
FAULTS = """
import json
from pathlib import Path
from miles_core.plugin import hookimpl
from miles_testing.doubles import remote

def reach(run, moment, step):
    path = run.directory.parent / "faults.json"
    waiting = json.loads(path.read_text())
    for fault in [f for f in waiting if f[:2] == [moment, step]]:
        waiting.remove(fault)
        path.write_text(json.dumps(waiting))
        (remote.latest().hang if fault[2].startswith("-") else remote.latest().kill)(fault[2].lstrip("-"))

@hookimpl
def on_sample(run, sample):
    reach(run, "rollout", sample.index // 8)

@hookimpl
def on_batch(run, batch):
    prompts = dict(zip(batch.group.tolist(), batch.tokens[batch.starts].tolist()))
    with (run.directory.parent / "trained.jsonl").open("a") as file:
        file.write(json.dumps([run.step, list(prompts.values()), sorted(prompts)]) + "\\n")
    reach(run, "train", run.step)

@hookimpl
def wrap_weights(run):
    def wrap(inner):
        def weights():
            reach(run, "sync", run.step)
            yield from inner()
        return weights
    return wrap

@hookimpl
def on_save(run, policy):
    if policy is not None:
        reach(run, "save", run.step)
"""

STEPS, PROMPTS = 4, 8  # of two groups


@pytest.fixture
def survive(toy_run, tmp_path):
    """``survive([(moment, step, worker)], **options)``: a toy run in which these are killed."""
    (tmp_path / "faults.py").write_text(FAULTS)

    def call(faults, **options):
        (tmp_path / "faults.json").write_text(json.dumps(faults))
        plugins = [remote.__file__, str(tmp_path / "faults.py")]
        given = {"runtime": "remote", "remote_engines": 2, "steps": STEPS, "save_interval": 2, **options}
        return toy_run(plugins, directory=tmp_path / "run", **given)

    return call


def check(done, tmp_path):
    """Every step once in the metrics; in the steps that count, every prompt exactly once, none lost."""
    assert not json.loads((tmp_path / "faults.json").read_text()), "a fault was never reached"
    assert [m["step"] for m in done.metrics if m["step"]] == list(range(1, STEPS + 1))
    last = {}
    for step, prompts, groups in map(json.loads, (tmp_path / "trained.jsonl").read_text().splitlines()):
        last[step] = prompts, groups
    assert sorted(last) == list(range(STEPS))
    assert Counter(p for prompts, _ in last.values() for p in prompts) == Counter(
        dict.fromkeys({p for ps, _ in last.values() for p in ps}, 1)
    )
    assert sum(len(prompts) for prompts, _ in last.values()) == PROMPTS


def rewards(done):
    return [m["reward/mean"] for m in done.metrics]


def test_it_computes_what_one_process_does(survive, toy_run, tmp_path):
    done, one = survive([]), toy_run(steps=STEPS)
    assert rewards(done) == rewards(one)
    for a, b in zip(done.metrics, one.metrics, strict=True):
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)
        assert {"time/prepare", "time/train", "busy/trainer-0", "idle/engine-1"} <= a.keys()
    check(done, tmp_path)


@pytest.mark.parametrize("schedule", ["sync", "ahead", "async"])
@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_that_dies_in_a_rollout_loses_nothing(survive, toy_run, tmp_path, schedule, engines):
    done = survive([("rollout", 1, "engine-0"), ("rollout", 2, "engine-0")], remote_engines=engines, schedule=schedule)
    check(done, tmp_path)
    assert remote.latest().restarts.used == 2
    if schedule == "sync":  # the same tokens under the same weights
        assert rewards(done) == rewards(toy_run(steps=STEPS))


@pytest.mark.parametrize("moment", ["train", "sync", "save"])
def test_an_engine_that_dies_elsewhere_costs_no_step(survive, tmp_path, moment):
    done = survive([(moment, 2, "engine-1")])
    check(done, tmp_path)
    assert len((tmp_path / "trained.jsonl").read_text().splitlines()) == STEPS


@pytest.mark.parametrize(
    ("moment", "step", "repeated"),
    [("rollout", 1, 1), ("train", 3, 2), ("sync", 3, 1), ("save", 2, 2), ("train", 0, 1)],
)
@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_rank_that_dies_goes_on_from_the_last_checkpoint(
    survive, toy_run, tmp_path, moment, step, repeated, schedule
):
    done = survive([(moment, step, "trainer-0")], schedule=schedule)
    check(done, tmp_path)
    if schedule == "sync":
        assert len((tmp_path / "trained.jsonl").read_text().splitlines()) == STEPS + repeated
        assert rewards(done) == rewards(toy_run(steps=STEPS))


@pytest.mark.parametrize("worker", ["engine-0", "trainer-0"])
def test_a_worker_that_hangs_in_a_push_is_named_itself(survive, toy_run, tmp_path, worker):
    done = survive([("sync", 2, f"-{worker}")], worker_heartbeat=0.5, sync_bucket_size=1 << 14)
    check(done, tmp_path)
    log = (done.directory / "run.log").read_text()
    assert f"worker {worker} was lost: it gave no sign of life for 0.5 s" in log
    assert remote.latest().restarts.used == 1 and rewards(done) == rewards(toy_run(steps=STEPS))


def test_workers_that_die_while_they_are_built_are_built_again(survive, tmp_path, monkeypatch):
    plain, struck = remote.DoubleWorkers.send, []

    async def send(self, number, method, *args):
        if method in ("confirm_plan", "build") and (method, self.names[number]) not in struck:
            struck.append((method, self.names[number]))
            self.crash(number)
        return await plain(self, number, method, *args)

    monkeypatch.setattr(remote.DoubleWorkers, "send", send)
    check(survive([], max_restarts=6), tmp_path)
    assert len(struck) == 6 and remote.latest().restarts.used == 6


def test_a_rank_that_dies_in_its_recovery_is_recovered(survive, tmp_path, monkeypatch):
    plain, calls = remote.DoubleWorkers.send, []

    async def send(self, number, method, *args):
        if self.names == ("trainer-0",) and (method == "build" or args[1:2] == ("load",)):
            calls.append(method)
            if len(calls) in (2, 3):  # the second build, and the load after the third
                self.crash(number)
        return await plain(self, number, method, *args)

    monkeypatch.setattr(remote.DoubleWorkers, "send", send)
    check(survive([("train", 3, "trainer-0")], max_restarts=5), tmp_path)
    assert len(calls) >= 5


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_rank_that_dies_as_it_sends_its_weights_to_the_only_engine_is_recovered(
    survive, tmp_path, monkeypatch, schedule
):
    """The engine died with requests in flight. They wait for its replacement, which waits for the rank's weights."""
    plain, posts, pushes = remote.DoubleWorkers.send, [], []

    async def send(self, number, method, *args):
        if method == "post":
            posts.append(method)
            if len(posts) == 3:
                self.crash(number)
        if len(posts) >= 3 and args[1:2] == ("push",):
            pushes.append(method)
            if len(pushes) == 1:
                self.crash(number)
        return await plain(self, number, method, *args)

    monkeypatch.setattr(remote.DoubleWorkers, "send", send)
    check(survive([], max_restarts=2, remote_engines=1, schedule=schedule), tmp_path)
    assert len(pushes) > 1 and remote.latest().restarts.used == 2


def test_an_engine_that_is_replaced_before_the_rank_waits_for_its_weights(survive, tmp_path, monkeypatch):
    plain, builds = remote.DoubleWorkers.send, []

    async def send(self, number, method, *args):
        if method == "build":
            builds.append(self.names[number])
            if builds.count("trainer-0") == 2 and self.names[number] == "trainer-0":
                while builds.count("engine-0") < 2:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(1.0)  # the new engine is built and asks for weights
        return await plain(self, number, method, *args)

    monkeypatch.setattr(remote.DoubleWorkers, "send", send)
    check(survive([("train", 2, "trainer-0"), ("train", 2, "engine-0")], remote_engines=1), tmp_path)
    assert builds.count("engine-0") == builds.count("trainer-0") == 2


def test_a_rank_dies_before_the_first_checkpoint_of_a_warm_started_run(survive, tmp_path):
    (tmp_path / "sft.jsonl").write_text('{"input": "a", "answer": "b"}\n' * 4)
    options = {"sft_data": tmp_path / "sft.jsonl", "sft_response_key": "answer", "sft_steps": 2, "sft_batch_size": 2}
    check(survive([("train", 1, "trainer-0")], **options), tmp_path)


@pytest.mark.thorough
def test_a_run_that_is_to_stop_replaces_nothing(survive, tmp_path, monkeypatch):
    from miles_core.train import rank

    plain = rank.Rank.learn

    def learn(self, share, step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            remote.latest().hang("trainer-0")
        return plain(self, share, step)

    monkeypatch.setattr(rank.Rank, "learn", learn)
    start = time.monotonic()
    done = survive([], stop_within=30, save_interval=1)
    assert time.monotonic() - start < 120 and done.run.stop_requested
    ended = json.loads((done.directory / "ending.json").read_text())
    assert ended["why"] == "stopped by SIGTERM" and ended["checkpoint"].endswith("step_00000003")


@pytest.mark.thorough
def test_a_run_that_is_to_stop_while_an_engine_hangs_saves_the_last_step(survive, tmp_path, monkeypatch):
    """The rank waits in its push for the engine, and no time-out is near."""
    plain = remote.DoubleWorkers.send

    async def send(self, number, method, *args):
        if method == "update" and args[1] == 3:
            remote.latest().hang("engine-1")
            os.kill(os.getpid(), signal.SIGTERM)
        return await plain(self, number, method, *args)

    monkeypatch.setattr(remote.DoubleWorkers, "send", send)
    done = survive([], stop_within=20, save_interval=None, worker_heartbeat=600)
    ended = json.loads((done.directory / "ending.json").read_text())
    assert ended["why"] == "stopped by SIGTERM" and ended["step"] == 3
    assert ended["checkpoint"].endswith("step_00000003")


def test_the_run_ends_when_too_many_are_lost(survive, tmp_path):
    with pytest.raises(
        WorkerLost, match=r"worker trainer-0 was lost: it was killed, and 1 workers were replaced before"
    ):
        survive([("train", 2, "trainer-0"), ("train", 3, "trainer-0")], max_restarts=1)
    assert (tmp_path / "run/checkpoints/step_00000002").is_dir()


def test_a_rule_of_a_worker_is_checked_there(survive, monkeypatch):
    from miles_core.plugin.plan import Plan

    def other(self, manifests):
        raise PlanError("plan 1 was made by miles-core 9, here is 0.1.0: install 9")

    monkeypatch.setattr(Plan, "check_installed", other)
    with pytest.raises(PlanError, match="install 9"):
        survive([])
