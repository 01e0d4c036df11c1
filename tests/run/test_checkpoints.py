"""Saving and loading: the event loop never waits for the disk."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_core.checkpoint.directory import Checkpoints
from miles_core.checkpoint.tensor_file import Saving, write_tensors
from miles_core.contracts.schedule import Position
from miles_core.data.sample import Sample
from miles_core.errors import CheckpointError
from miles_core.observe.timer import Clock
from miles_core.run.checkpoints import RunCheckpoints


class Learner:
    """Writes one file of tensors in a thread."""

    async def save(self, directory, later=False):
        self.saving = await asyncio.to_thread(self.write, directory, later)

    def write(self, directory, later):
        import torch

        directory.mkdir()
        with Saving(directory, later) as saving:
            write_tensors({"weight": torch.arange(4)}, directory / "model.safetensors")
        return saving

    async def collect_digests(self):
        return self.saving.digests()

    async def load(self, directory):
        assert (directory / "model.safetensors").is_file()


class Schedule:
    """Holds one sample."""

    loaded = None

    def state(self):
        return Position(
            {"prompts": {"waiting": [{"text": "a"}]}}, (Sample(tokens=[1, 2, 3], rollout_log_probs=[-0.5]),)
        )

    def load_state(self, position):
        self.loaded = position


def make(directory, resume_from=None, async_save=False):
    options = SimpleNamespace(save_interval=1, async_save=async_save, keep=1)
    policy = SimpleNamespace(name="policy", trained=3, version=3)
    run = SimpleNamespace(
        directory=directory,
        step=1,
        policies=[policy],
        clock=Clock(),
        config=SimpleNamespace(run=options),
        plan=SimpleNamespace(record=lambda: None),
        hooks=SimpleNamespace(on=lambda *_, **__: None),
    )
    return RunCheckpoints(run, [SimpleNamespace(policy=policy, learner=Learner())], Schedule(), resume_from)


@pytest.fixture
def disk_calls(monkeypatch):
    """Threads that flushed, renamed or deleted files."""
    threads = []

    def watch(owner, name):
        plain = getattr(owner, name)

        def call(*args, **named):
            threads.append((name, threading.current_thread() is threading.main_thread()))
            return plain(*args, **named)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((os, "fsync"), (Path, "rename"), (shutil, "rmtree"), (Path, "read_text")):
        watch(owner, name)
    return threads


@pytest.mark.parametrize("later", [False, True])
def test_no_disk_work_in_the_thread_of_the_event_loop(tmp_path, disk_calls, later):
    async def work():
        checkpoints = make(tmp_path, async_save=later)
        for step in (1, 2):
            checkpoints.run.step = step
            await checkpoints.commit()
        await checkpoints.complete()
        assert checkpoints.saved_step == 2
        resumed = make(tmp_path, await asyncio.to_thread(checkpoints.directories.load))
        assert await resumed.resume() and resumed.run.step == 2
        return resumed.schedule.loaded

    loaded = asyncio.run(work())
    assert loaded.samples == Schedule().state().samples
    assert {name for name, _ in disk_calls} == {"fsync", "rename", "rmtree", "read_text"}
    assert not [name for name, in_loop in disk_calls if in_loop]
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2]


def test_errors_before_and_in_the_last_flush_leave_the_earlier_checkpoint(tmp_path, monkeypatch):
    async def work(error, where):
        checkpoints = make(tmp_path)
        await checkpoints.save()
        checkpoints.run.step = 2
        with monkeypatch.context() as patch:
            patch.setattr(f"miles_core.{where}", lambda *_: (_ for _ in ()).throw(error))
            with pytest.raises((CheckpointError, ValueError), match=r"disk is full|not an error of the disk"):
                await checkpoints.save()
        assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]

    asyncio.run(work(OSError(28, "No space left on device"), "run.checkpoints.seal"))
    asyncio.run(work(OSError(28, "No space left on device"), "checkpoint.directory.Checkpoints._replace"))
    asyncio.run(work(ValueError("not an error of the disk"), "run.checkpoints.seal"))


def test_a_save_that_is_cancelled_leaves_nothing(tmp_path):
    async def work():
        checkpoints = make(tmp_path)
        checkpoints.parts[0].learner.collect_digests = lambda: asyncio.sleep(0)  # None: never complete
        saving = asyncio.create_task(checkpoints.save(later=True))
        await saving
        await checkpoints.close()
        assert not list((tmp_path / "checkpoints").iterdir())

    asyncio.run(work())


def test_the_error_of_an_abandoned_save_is_not_reported_again(tmp_path):
    async def fail_when_cancelled():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise OSError("its worker has ended") from None

    async def work():
        reported = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["message"]))
        checkpoints = make(tmp_path)
        checkpoints.parts[0].learner.collect_digests = fail_when_cancelled
        await checkpoints.save(later=True)
        await checkpoints.close()
        gc.collect()
        assert reported == []

    asyncio.run(work())


def test_checkpoints_of_earlier_versions_hold_columns_as_lists(tmp_path):
    from miles_core.checkpoint.samples import get_samples
    from miles_core.checkpoint.store import Store

    row = {
        "prompt": "a",
        "tokens": [1, 2],
        "response_length": 1,
        "loss_mask": None,
        "rollout_log_probs": [-0.5],
        "fields": {},
    }
    Store(tmp_path).put("held", data=[row])
    (sample,) = get_samples(Store(tmp_path), "held")
    assert sample.tokens == [1, 2] and sample.loss_mask is None and sample.rollout_log_probs == [-0.5]
