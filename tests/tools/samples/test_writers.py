"""Samples that stay where they were produced are saved by a process that reads them there."""

import asyncio
import gc
import os
import signal
import sys
import types

import numpy as np
import pytest

from miles_core.contracts.runtime import TrainedTokens
from miles_core.data.media import Media
from miles_core.data.sample import Sample, Status
from miles_core.errors import MilesError
from miles_tools.samples import writers
from miles_tools.samples.files import FILE, read_rollouts
from miles_tools.samples.saver import SampleSaver
from miles_workers import remote_sample
from miles_workers.remote_sample import RemoteSample, heads, pack_samples, refer
from miles_workers.remote_tokens import pack_tokens, refer_tokens


class Letters:
    """Counts how often each token is looked up."""

    def __init__(self):
        self.looked_up = []

    def convert_ids_to_tokens(self, token):
        return "\u2581" + chr(token)

    def decode(self, tokens):
        self.looked_up += tokens
        return "".join(map(chr, tokens))


def groups(length, count=4):
    """Groups of three samples of ``length`` tokens after a prompt of two."""
    random = np.random.default_rng(length)
    return [
        [
            Sample(
                prompt=f"question {group}",
                tokens=random.integers(32, 1000, length + 2).tolist(),
                response="\ud83d an answer",
                response_length=length,
                reward={"a": 1.0},
                status=Status.COMPLETED,
                loss_mask=[0, *[1] * (length - 1)],
                rollout_log_probs=[-0.1234567] * length,
                metadata={"x": {3}},
                weight_versions=[(0, 4)],
                group_index=group,
                index=3 * group + number,
            )
            for number in range(3)
        ]
        for group in range(count)
    ]


def recorded(samples):
    return [
        TrainedTokens(
            np.full(s.response_length, -0.5 * s.index, np.float32), np.full(s.response_length, np.nan, np.float32)
        )
        for s in samples
    ]


def plain(length, count=4):
    samples = [sample for group in groups(length, count) for sample in group]
    return [(sample, seen, "set") for sample, seen in zip(samples, recorded(samples), strict=True)]


def referred(length, count=4, trained=True):
    """The same as references to samples and to recorded values."""
    made = groups(length, count)
    samples = [sample for group in made for sample in refer_group(group)]
    values = recorded([sample for group in made for sample in group])
    if trained:
        values = refer_tokens(len(values), pack_tokens(values))
    return [(sample, seen, "set") for sample, seen in zip(samples, values, strict=True)]


def refer_group(group):
    return refer(heads(group), pack_samples(group))


@pytest.fixture
def nothing_is_read(monkeypatch):
    def read(*_):
        raise AssertionError("the driver read samples")

    monkeypatch.setattr(remote_sample, "read_samples", read)
    monkeypatch.setattr(writers.JoinedRows, "of", read)


def save(directory, *steps, tokenizer=None, writers=8):
    """Save steps, which are functions; return the rows and the number of processes."""

    async def run(saver):
        for number, step in enumerate(steps, start=1):
            await saver.write_samples("train", number, step())

    saver = SampleSaver(directory, tokenizer or Letters(), 1 << 30, writers)
    asyncio.run(run(saver))
    processes = len(saver._writers._readers.get(True, ()))
    saver.close()
    return list(read_rollouts(directory)), processes


def open_files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("length", [5, 3000])
def test_files_are_those_of_samples_in_the_driver(tmp_path, nothing_is_read, monkeypatch, length):
    files = open_files()
    found, processes = save(tmp_path / "there", lambda: referred(length), lambda: referred(length + 1))
    assert processes == 1 and open_files() == files
    monkeypatch.undo()
    expected, none = save(tmp_path / "here", lambda: plain(length), lambda: plain(length + 1))
    assert none == 0 and found == expected and len(found) == 24
    assert found[1]["train_log_probs"][0] == -0.5 and found[0]["metadata"] == {"x": "{3}"}


def test_images_of_samples_elsewhere_are_stored(tmp_path, nothing_is_read):
    image = Media.of("image", b"of a column")

    def with_image():
        group = groups(5, 1)[0]
        for sample in group:
            sample.media = (image,)
        return [(sample, None, "") for sample in refer_group(group)]

    found, processes = save(tmp_path, with_image, with_image)
    assert processes == 1 and [row["media"] for row in found] == [[{"kind": "image", "digest": image.digest}]] * 6
    assert (tmp_path / "rollouts/media" / image.digest).read_bytes() == b"of a column"


def test_several_processes_write_parts_of_a_file(tmp_path, nothing_is_read, monkeypatch):
    monkeypatch.setattr(writers, "SHARE", 100)
    found, processes = save(tmp_path / "there", lambda: referred(100), lambda: referred(50), writers=3)
    monkeypatch.undo()
    expected, _ = save(tmp_path / "here", lambda: plain(100), lambda: plain(50))
    assert processes == 3 and found == expected
    assert sorted(p.name for p in (tmp_path / "there/rollouts/train").iterdir()) == [
        "00000001.jsonl.gz",
        "00000002.jsonl.gz",
    ]


def test_changes_in_the_driver_are_saved(tmp_path, nothing_is_read):
    def step():
        changed = referred(500)
        changed[2][0].reward, changed[2][0].remove_sample = 7.0, True
        return changed

    found, _ = save(tmp_path, step)
    assert [(row["reward"], row["removed"]) for row in found[1:3]] == [({"a": 1.0}, False), (7.0, True)]


def test_samples_that_the_driver_has_read_are_saved_with_the_others(tmp_path):
    def step():
        some = referred(500)
        assert some[0][0].tokens and type(some[0][0]) is Sample and type(some[1][0]) is RemoteSample
        some[0][0].metadata["changed"] = object
        return some

    found, _ = save(tmp_path / "there", step)
    expected, _ = save(tmp_path / "here", lambda: plain(500))
    assert found[0]["metadata"].pop("changed") == "<class 'object'>" and found == expected


def test_values_of_a_trainer_in_the_driver_are_sent(tmp_path, nothing_is_read, monkeypatch):
    found, _ = save(tmp_path / "there", lambda: referred(5000, trained=False))
    unseen, _ = save(tmp_path / "unseen", lambda: [(sample, None, "") for sample, _, _ in referred(5)])
    monkeypatch.undo()
    assert found == save(tmp_path / "here", lambda: plain(5000))[0]
    assert unseen[0]["train_log_probs"] is None and unseen[0]["advantages"] is None


def test_each_text_is_looked_up_once(tmp_path):
    tokenizer = Letters()
    found, _ = save(tmp_path, lambda: referred(500), lambda: referred(500), lambda: referred(501), tokenizer=tokenizer)
    assert sorted(tokenizer.looked_up) == sorted({t for row in found for t in row["tokens"][2:]})
    assert found[-1]["pieces"] == [f" {chr(token)}" for token in found[-1]["tokens"][2:]]


def test_samples_exist_until_they_are_read(tmp_path):
    """The driver drops its references while the process has not read the message yet."""

    async def run(saver):
        await saver.write_samples("train", 1, referred(3000))
        await saver._complete()
        stopped = saver._writers._readers[True][0].pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            await saver.write_samples("train", 2, referred(3001))
            gc.collect()
            await asyncio.sleep(0.2)
            assert not (tmp_path / FILE.format("train", 2)).exists()
        finally:
            os.kill(stopped, signal.SIGCONT)

    saver = SampleSaver(tmp_path, Letters(), 1 << 30)
    asyncio.run(run(saver))
    saver.close()
    lengths = [row["response_length"] for row in read_rollouts(tmp_path, step=2)]
    assert lengths == [3001] * 12


@pytest.mark.parametrize("busy", [False, True])
def test_a_process_that_dies_stops_the_run_with_one_sentence(tmp_path, busy):
    async def run(saver):
        await saver.write_samples("train", 1, referred(1000))
        await saver._complete()
        process = saver._writers._readers[True][0].pid
        if busy:  # the message is sent, and the answer will not arrive
            os.kill(process, signal.SIGSTOP)
            await saver.write_samples("train", 2, referred(1000))
            await asyncio.sleep(0.2)
        os.kill(process, signal.SIGKILL)
        for step in (3, 4, 5):
            await saver.write_samples("train", step, referred(1000))

    saver = SampleSaver(tmp_path, Letters(), 1 << 30)
    with pytest.raises(
        MilesError,
        match=r"^the process that saves samples was killed by signal 9; resume the run, or resume it with --no-save-rollouts$",
    ):
        asyncio.run(run(saver))
    saver.close()
    assert {row["step"] for row in read_rollouts(tmp_path)} == {1}
    resumed = SampleSaver(tmp_path, Letters(), 1 << 30)
    resumed.roll_back(1)
    asyncio.run(resumed.write_samples("train", 2, referred(1000)))
    resumed.close()
    assert {row["step"] for row in read_rollouts(tmp_path)} == {1, 2}
    assert not list(tmp_path.rglob("*.part"))


def test_a_process_that_cannot_write_stops_the_run_with_one_sentence(tmp_path):
    (tmp_path / "rollouts/train/00000001.jsonl.part").mkdir(parents=True)  # as if the file could not be created
    saver = SampleSaver(tmp_path, Letters(), 1 << 30)
    asyncio.run(saver.write_samples("train", 1, referred(1000)))
    with pytest.raises(MilesError, match=r"cannot write the samples of step 1 to .*Is a directory; free space there"):
        saver.close()


def test_samples_that_the_process_cannot_read_stop_the_run_with_one_sentence(tmp_path, monkeypatch):
    here = types.ModuleType("a_file_of_the_user")  # no other process can import it
    exec("class Thing: ...", here.__dict__)
    monkeypatch.setitem(sys.modules, here.__name__, here)

    def step():
        group = groups(10, 1)[0]
        group[0].metadata["object"] = here.Thing()
        return [(sample, None, "") for sample in refer_group(group)]

    saver = SampleSaver(tmp_path, Letters(), 1 << 30)
    asyncio.run(saver.write_samples("train", 1, step()))
    with pytest.raises(MilesError, match=r"the process that saves samples failed: .*keep plain data there"):
        saver.close()


def test_a_run_that_repeats_steps_waits_for_the_file(tmp_path):
    """The event loop cannot look up texts while it waits."""

    async def run(saver):
        await saver.write_samples("train", 1, referred(1000))
        await saver.write_samples("train", 2, referred(2000))
        saver.roll_back(1)

    saver = SampleSaver(tmp_path, Letters(), 1 << 30)
    asyncio.run(run(saver))
    saver.close()
    assert {row["step"] for row in read_rollouts(tmp_path)} == {1}


def test_a_tokenizer_that_fails_stops_the_run(tmp_path):
    class Failing(Letters):
        def decode(self, tokens):
            raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        save(tmp_path, lambda: referred(100), lambda: referred(100), tokenizer=Failing())
