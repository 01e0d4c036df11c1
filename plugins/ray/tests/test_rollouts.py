"""Rollout workers as actors, and the process that saves their samples; the tests kill them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from miles_core.contracts.runtime import TrainedTokens
from miles_core.data import Sample
from miles_core.errors import MilesError
from miles_testing import toy_run
from miles_tools.samples.files import read_rollouts
from miles_tools.samples.saver import SampleSaver
from miles_workers import remote_sample
from miles_workers.remote_sample import heads, pack_samples, refer
from miles_workers.remote_tokens import StoredTokens, pack_tokens, refer_tokens

#: The first worker that finishes a sample of the second step dies.
FAULTS = """
import os, signal
from miles_core.plugin import hookimpl

@hookimpl
def on_sample(run, sample):
    flag = run.directory / "killed"
    if run.step == 1 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def nothing_is_read(monkeypatch):
    def read(*_):
        raise AssertionError("the driver read tokens")

    monkeypatch.setattr(remote_sample, "read_samples", read)
    monkeypatch.setattr(StoredTokens, "values", read)


@pytest.mark.thorough
def test_samples_are_those_of_one_process_although_a_worker_dies(cluster, tmp_path, nothing_is_read):
    (tmp_path / "faults.py").write_text(FAULTS)
    there = toy_run(
        [str(tmp_path / "faults.py")],
        directory=tmp_path / "run",
        steps=3,
        runtime="ray",
        rollout_workers=2,
        log_level="info",
    )
    here = toy_run(steps=3)

    def rows(done):
        return [{key: value for key, value in row.items() if "log_probs" not in key} for row in done.samples]

    assert rows(there) == rows(here)
    assert all(row["pieces"] and row["train_log_probs"] for row in there.samples)
    assert all(f"busy/rollout-{number}" in m for m in there.metrics for number in range(2))
    log = (there.directory / "run.log").read_text()
    assert "was lost: its process died" in log and "it is replaced (1 of 3 times)" in log
    assert "rollout-1: miles_workers.output: process" in log


class Letters:
    def convert_ids_to_tokens(self, token):
        return chr(token)

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def test_samples_in_rays_store_are_saved_by_an_actor_until_it_dies(cluster, tmp_path, nothing_is_read):
    ray = pytest.importorskip("ray")
    from miles_ray.stored import StoredRefs

    group = [Sample(f"question {n}", [65 + n] * 50_002, "answer", 50_000, index=n) for n in range(3)]
    values = [TrainedTokens(np.full(50_000, -0.5, np.float32), np.full(50_000, float(n), np.float32)) for n in range(3)]

    def step():
        refs = StoredRefs(ray.put([pack_samples(group), pack_tokens(values)]))
        return [(s, t, "") for s, t in zip(refer(heads(group), refs[0]), refer_tokens(3, refs[1]), strict=True)]

    async def run(saver):
        await saver.write_samples("train", 1, step())
        await saver.write_samples("train", 2, step())
        await saver._complete()
        ray.kill(saver._writers._readers[True][0]._actor)
        for number in (3, 4, 5):
            await saver.write_samples("train", number, step())

    saver = SampleSaver(tmp_path, Letters(), 1 << 30)
    with pytest.raises(
        MilesError, match=r"^the process that saves samples was lost \(ActorDiedError: .*; resume the run"
    ):
        asyncio.run(run(saver))
    saver.close()
    found = list(read_rollouts(tmp_path))
    assert [(row["step"], row["index"]) for row in found] == [(step, n) for step in (1, 2) for n in range(3)]
    assert found[4]["tokens"] == [66] * 50_002 and found[4]["pieces"] == ["B"] * 50_000
    assert found[4]["train_log_probs"] == [-0.5] * 50_000 and found[4]["advantages"] == [1.0] * 50_000
