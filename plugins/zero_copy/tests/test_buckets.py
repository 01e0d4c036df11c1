"""Buckets to an engine that keeps weights of its own, in this process and in another."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from miles_core.data import Encoded
from miles_core.engine import CopyTransport, Sampling
from miles_core.plugin import MilesError, SyncError
from miles_core.trainer import World
from miles_testing.asking import ask, start_and_wait
from miles_testing.engine_contract import FREE
from miles_testing.stored import stored_units
from miles_zero_copy import paths, segment, sender
from miles_zero_copy import transport as transport_module
from miles_zero_copy.transport import BucketTransport

SMALL = 40 << 10  # the tiny model takes four of them


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def transport(engine):
    made = BucketTransport(engine, World(), SMALL)
    yield made
    made.close()


def test_what_arrives_is_what_was_sent(engine, transport, checkpoints, caplog):
    caplog.set_level(logging.INFO)
    units = stored_units(checkpoints[1])
    for version in (3, 4):
        report = asyncio.run(transport.send(iter(units), version))
        assert engine.version == report.version == version and report.metrics["of_limit"] > 0
        assert (report.nbytes, report.tensors) == (sum(u.nbytes for u in units), len(units))
    received, kinds = weights(engine), set(engine.received)
    asyncio.run(engine.update_weights(units, 5))
    assert same(received, weights(engine)) and kinds == {"file"}
    assert "weights travel through shared memory" in caplog.text
    assert len(engine.received) == 1 + 2 * 4 and engine.most == 1  # the greeting, and full buckets one by one


def test_an_engine_reads_versions_where_they_arrive(engine, checkpoints, shared_memory, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sender, "PIECE", SMALL)
    transport = BucketTransport(engine, World(), SMALL, staging=True, stay=True)
    sent = [stored_units(checkpoint) for checkpoint in checkpoints]
    lasting = "model.embed_tokens.weight"

    async def pushed(version, stage=False):
        units = sent[version % 2]
        if stage:
            await transport.stage(iter(units), version)
        await transport.send(iter(() if stage else units), version)
        assert engine.version == version
        served = weights(engine)
        return engine.model.get_parameter(lasting).data_ptr(), served

    async def pushes():
        found = [await pushed(version, stage=version in (3, 4)) for version in range(1, 6)]
        engine.spoil = lambda message, number: {**message, "checksum": 0} if message["number"] == 3 else message
        with pytest.raises(SyncError, match="checksum"):
            await transport.send(iter(sent[0]), 6)
        assert same(weights(engine), found[-1][1])  # nothing was written over
        engine.spoil = None
        return found, [await pushed(version) for version in (6, 7)]

    (first, *turns), again = asyncio.run(pushes())
    assert len(set(re.findall(r"two versions of (\d+) bytes", caplog.text))) == 1  # the greeting is no version
    at = [place for place, _ in turns]
    assert len({first[0], *at}) == 3 and at[0] == at[2] != at[1] == at[3]
    files, copied = {file: file.read_bytes() for file in shared_memory.iterdir()}, []
    for units in sent:  # the plain copy writes into memory of the engine's own
        asyncio.run(engine.update_weights(units, 8))
        copied.append(weights(engine))
    assert files == {file: file.read_bytes() for file in files} and len(files) == 4
    served = [values for _, values in (first, *turns, *again)]
    assert all(same(values, copied[version % 2]) for version, values in enumerate(served, start=1))
    transport.close()


def test_ranks_send_their_parts_and_the_last_one_makes_it_a_version(engine, checkpoints):
    units = stored_units(checkpoints[1])
    parts = [units[::2], units[1::2], []]
    transports = [BucketTransport(engine, World(rank, 3), SMALL) for rank in range(3)]

    async def push():
        await asyncio.gather(*[t.send(iter(part), 1) for t, part in zip(transports, parts, strict=True)])

    asyncio.run(push())
    received = weights(engine)
    for transport in transports:
        transport.close()
    assert engine.version == 1
    asyncio.run(engine.update_weights(units, 2))
    assert same(received, weights(engine))


def test_a_bucket_with_another_checksum_is_a_failed_sync_and_the_next_push_repairs_it(engine, transport, checkpoints):
    units, rest = stored_units(checkpoints[1]), []

    def spoil(message, number):
        return {**message, "checksum": message["checksum"] ^ (number == 3)}

    def stream():
        for unit in units:
            rest.append(unit)
            yield unit

    engine.spoil = spoil
    with pytest.raises(
        SyncError, match=r"starts with model\..* arrived with checksum [0-9a-f]{16}, but [0-9a-f]{16} was sent"
    ):
        asyncio.run(transport.send(stream(), 1))
    assert engine.version == -1 and len(rest) == len(units)  # consumed to its end
    with asyncio.Runner() as runner, pytest.raises(MilesError, match="no complete weights"):
        ask(runner, engine, [[3, 4]], FREE)
    engine.spoil = None
    asyncio.run(transport.send(iter(units), 1))
    assert engine.version == 1
    with asyncio.Runner() as runner:
        assert len(ask(runner, engine, [[3, 4]], FREE)[0].tokens) == 10


def one_way(name, monkeypatch):
    """Weights travel by this path only."""
    made = paths.broadcast if name == "broadcast" else lambda *_: paths.paths(torch.device("cpu"))[name]()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(transport_module, "paths", lambda *given: {name: partial(made, *given[:2])})


@pytest.mark.parametrize("way", ["shared memory", "messages over the runtime's channel", "broadcast", "a copy"])
def test_a_sync_that_ends_in_the_middle_leaves_an_engine_that_answers_nothing(
    engine, checkpoints, monkeypatch, caplog, way
):
    one_way(way, monkeypatch)
    transport = CopyTransport(engine) if way == "a copy" else BucketTransport(engine, World(), SMALL)
    old, new = (stored_units(checkpoint) for checkpoint in checkpoints)
    ends = [KeyboardInterrupt("by the user"), RuntimeError("in the trainer"), *([None] if way != "a copy" else [])]

    def stream(end):
        yield from new if end is None else new[: len(new) // 2]
        if end is not None:
            raise end

    def wrong(message, number):
        return {**message, "checksum": 0} if message["number"] == 2 else message

    with asyncio.Runner() as runner:
        for end in ends:
            for version in (1, 2):  # the second one as a difference, where these travel
                runner.run(transport.send(iter(old), version))
            engine.spoil = wrong if end is None else None
            with pytest.raises((KeyboardInterrupt, RuntimeError, SyncError), match=r"user|trainer|checksum"):
                runner.run(transport.send(stream(end), 3))
            engine.spoil = None
            assert engine.version == 2
            with pytest.raises(MilesError, match="no complete weights"):
                ask(runner, engine, [[3, 4]], FREE)
            with pytest.raises(MilesError, match="no complete weights"):
                runner.run(engine.score([[3, 4]]))
        runner.run(transport.send(iter(new), 3))
        received = weights(engine)
        assert len(ask(runner, engine, [[3, 4]], FREE)[0].tokens) == 10
        runner.run(engine.update_weights(new, 4))
    transport.close()
    assert same(received, weights(engine))
    gc.collect()
    assert "never retrieved" not in caplog.text  # a bucket that was on its way behind the wrong one


def test_an_engine_that_was_started_anew_in_the_middle_says_so(engine, transport, checkpoints):
    def spoil(message, number):
        if number == 3:
            engine._weights.arrivals.forget()
        return message

    engine.spoil = spoil
    with pytest.raises(SyncError, match="bucket 2 of version 1 arrived, but bucket 0 was expected"):
        asyncio.run(transport.send(iter(stored_units(checkpoints[1])), 1))


def stepped(units):
    """A step of an optimiser that changes a hundredth of the weights by one unit in the last place."""
    bits = {u.name: u.parts[u.name].view(torch.int32).clone() for u in units}
    for words in bits.values():
        words += (torch.rand(words.shape) < 0.01).int()
    return [Encoded(name, {name: words.view(torch.float32)}) for name, words in bits.items()]


def test_an_engine_that_cannot_read_shared_memory_gets_messages_and_then_what_changed(
    engine, transport, checkpoints, unreachable, caplog
):
    engine.spoil = unreachable
    units = stored_units(checkpoints[1])
    full = asyncio.run(transport.send(iter(units), 1))
    assert engine.version == 1 and set(engine.received) == {"file", "data"}
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert record.message == (
        "weights travel through messages over the runtime's channel, because the two are on different hosts"
    )
    engine.received, steps = [], [stepped(units)]
    report = asyncio.run(transport.send(iter(steps[0]), 2))
    received = weights(engine)
    asyncio.run(transport.engine.update_weights(steps[0], 2))  # a copy, after which nobody holds a base
    assert same(received, weights(engine)) and set(engine.received) == {"delta"}
    assert report.nbytes < 0.05 * full.nbytes and report.metrics["travelled"] < 0.05
    with pytest.raises(
        SyncError, match=r"starts with \S+ arrived as a difference to version 2, which this engine does not have"
    ):
        asyncio.run(transport.send(iter(stepped(steps[0])), 3))
    assert asyncio.run(transport.send(iter(units), 3)).nbytes > full.nbytes / 2
    asyncio.run(engine.update_weights(units, 4))
    assert engine.version == 4


def test_a_broadcast_brings_the_same_buckets_and_an_engine_that_cannot_be_reached_another_way(
    engine, transport, checkpoints, monkeypatch, caplog
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ways = paths.paths(torch.device("cpu"))
    monkeypatch.setattr(
        transport_module, "paths", lambda *given: {"a broadcast (gloo)": partial(paths.broadcast, *given[:2]), **ways}
    )
    caplog.set_level(logging.INFO)
    units = stored_units(checkpoints[1])
    for version in (1, 2):
        report = asyncio.run(transport.send(iter(units), version))
    received = weights(engine)
    assert set(engine.received) == {"broadcast"} and report.metrics["of_limit"] > 0
    assert "weights travel through a broadcast (gloo)" in caplog.text
    assert engine.most == 2  # one on its way while one is taken
    asyncio.run(engine.update_weights(units, 3))
    assert same(received, weights(engine))
    transport.close()

    def spoil(message, number):
        return message if "host" not in str(message) else {**message, "memory": {**message["memory"], "port": 9}}

    engine.spoil = spoil
    asyncio.run(transport.send(iter(units), 4))
    assert (
        engine.version == 4
        and "weights travel through shared memory, because the engine's process cannot" in caplog.text
    )


def test_a_bucket_goes_ahead_of_an_answer_and_no_memory_is_filled_before_it_was_read(
    engine, transport, checkpoints, monkeypatch
):
    ways = {"shared memory": lambda: replace(paths._shared(stays=False), ahead=1)}
    monkeypatch.setattr(transport_module, "paths", lambda *given: ways)
    take, waiting = engine.receive, 0
    most = 0

    async def slow(*message):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.005)
        await take(*message)
        waiting -= 1

    monkeypatch.setattr(engine, "receive", slow)
    units = stored_units(checkpoints[1])
    asyncio.run(transport.send(iter(units), 1))
    received = weights(engine)
    assert most == 2
    asyncio.run(engine.update_weights(units, 2))
    assert same(received, weights(engine))


def test_an_engine_that_dies_at_the_greeting_leaves_no_shared_memory(engine, transport, checkpoints, shared_memory):
    def dies(message, number):
        raise RuntimeError("gone")

    engine.spoil = dies
    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(transport.send(iter(stored_units(checkpoints[1])), 1))
    assert not list(shared_memory.iterdir())


def test_a_host_without_shared_memory_gets_messages(engine, transport, checkpoints, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(segment, "DIRECTORY", tmp_path / "shm")
    asyncio.run(transport.send(iter(stored_units(checkpoints[1])), 1))
    assert engine.version == 1 and set(engine.received) == {"data"}
    assert f"there is no shared memory on this host: {tmp_path / 'shm'} does not exist" in caplog.text


def test_shared_memory_that_gets_full_in_the_middle_is_a_failed_sync_and_the_next_one_does_without(
    engine, transport, checkpoints, monkeypatch, caplog
):
    monkeypatch.setattr(sender, "FIRST", 4096)  # what comes next needs more
    monkeypatch.setattr(segment.os, "posix_fallocate", partial(full, segment.os.posix_fallocate))
    with pytest.raises(SyncError, match="bytes of shared memory cannot be allocated"):
        asyncio.run(transport.send(iter(stored_units(checkpoints[1])), 1))
    assert engine.version == -1
    asyncio.run(transport.send(iter(stored_units(checkpoints[1])), 1))
    assert engine.version == 1 and "runtime's channel, because 40,960 bytes of shared memory cannot be" in caplog.text


def full(allocate, file, start, nbytes):
    """A /dev/shm that has room for the first buckets only."""
    if nbytes > 4096:
        raise OSError(28, "No space left on device")
    allocate(file, start, nbytes)


def test_shared_memory_that_is_full_is_said_with_what_helps():
    with pytest.raises(
        segment.NoSegmentError, match=r"bytes of shared memory cannot be allocated .* use a smaller --sync-bucket-size"
    ):
        segment.Segment(1 << 60)


def test_a_bucket_that_is_smaller_than_a_tensor_grows(engine, checkpoints, caplog):
    units = stored_units(checkpoints[1])
    transport = BucketTransport(engine, World(), 2048)
    asyncio.run(transport.send(iter(units), 1))
    transport.close()
    assert engine.version == 1
    assert "--sync-bucket-size 2048 is smaller than " in caplog.text and "using buckets of that size" in caplog.text


KILLED = (
    "import os, pathlib, signal, sys; from miles_zero_copy import segment; segment.DIRECTORY = pathlib.Path(sys.argv[1]); "
    "{}segment.Segment(4096); os.kill(os.getpid(), signal.SIGKILL)"
)


def test_memory_is_freed_when_its_process_is_killed(shared_memory):
    subprocess.run([sys.executable, "-c", KILLED.format(""), str(shared_memory)], check=False)
    end = time.monotonic() + 20
    while list(shared_memory.iterdir()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not list(shared_memory.iterdir())


def test_memory_that_is_left_is_freed_by_the_next_run_and_that_of_a_living_one_is_not(shared_memory):
    no_helper = "segment._remove_after_exit = lambda path: None; "
    subprocess.run([sys.executable, "-c", KILLED.format(no_helper), str(shared_memory)], check=False)
    mine = segment.Segment(8192)
    assert segment.free_leftovers() == 4096
    assert mine.path.exists()
    mine.close()


def test_a_version_is_staged_while_the_engine_generates_and_switched_between_two_tokens(engine, checkpoints):
    old, new = stored_units(checkpoints[0]), stored_units(checkpoints[1])
    transport = BucketTransport(engine, World(), SMALL, staging=True)

    async def generated():
        await engine.update_weights(old, 1)
        (request,) = await start_and_wait(engine, [[5]], Sampling(40, temperature=0.9, ignore_eos=True))
        before = len(engine.rows[0].tokens)
        await transport.stage(iter(new), 2)
        during = len(engine.rows[0].tokens)
        assert engine.version == 1 and not request.done()
        await engine.pause("in_place")
        report = await transport.send(iter(()), 2)  # the stream is not asked again
        await engine.resume()
        return before, during, report, await request

    before, during, report, response = asyncio.run(generated())
    transport.close()
    assert before < during and report.nbytes == sum(u.nbytes for u in new)
    assert response.weight_versions == [(0, 1), (during - 1, 2)]
    staged = weights(engine)
    asyncio.run(engine.update_weights(new, 3))
    assert same(staged, weights(engine))


def test_a_staged_version_that_is_wrong_leaves_the_engine_as_it_was(engine, checkpoints):
    transport = BucketTransport(engine, World(), SMALL, staging=True)
    asyncio.run(engine.update_weights(stored_units(checkpoints[0]), 1))
    before = weights(engine)
    engine.spoil = lambda message, number: {**message, "checksum": 0} if number == 3 else message
    with pytest.raises(SyncError):
        asyncio.run(transport.stage(iter(stored_units(checkpoints[1])), 2))
    assert engine.version == 1 and same(before, weights(engine))
    with asyncio.Runner() as runner:
        assert len(ask(runner, engine, [[3, 4]], FREE)[0].tokens) == 10
    engine.spoil = None
    asyncio.run(transport.send(iter(stored_units(checkpoints[1])), 2))
    assert engine.version == 2
    asyncio.run(transport.stage(iter(stored_units(checkpoints[0])), 3))
    engine._weights.arrivals.forget()  # it was started anew
    with pytest.raises(SyncError, match="version 3 was not staged in this engine"):
        asyncio.run(transport.send(iter(()), 3))
    transport.close()


def inline_bytes(engine, monkeypatch):
    """From now on: the bytes of weights that each message to the engine carries."""
    carried, receive = [], engine.receive

    async def counting(message, version, last):
        if message.get("units"):
            carried.append(len(message["memory"]["data"]))
        await receive(message, version, last)

    monkeypatch.setattr(engine, "receive", counting)
    return carried


def test_the_bytes_that_are_reported_are_those_that_were_sent(engine, transport, checkpoints, unreachable, monkeypatch):
    engine.spoil = unreachable
    units = stored_units(checkpoints[1])
    asyncio.run(transport.send(iter(units), 1))
    carried = inline_bytes(engine, monkeypatch)
    limit, whole = transport._limit, sum(u.nbytes for u in units)
    noise = [Encoded(u.name, {u.name: torch.randn_like(u.parts[u.name])}) for u in units]
    for version, step in enumerate((units, stepped(units), noise, noise, stepped(noise)), start=2):
        carried.clear()
        report = asyncio.run(transport.send(iter(step), version))
        assert report.nbytes == sum(carried) > 0 and report.metrics["travelled"] == sum(carried) / whole
        assert report.metrics["of_limit"] == pytest.approx(sum(carried) / report.seconds / limit)


def test_padding_between_small_tensors_is_no_saving(engine, transport, unreachable, monkeypatch):
    """Mostly padding: each tensor takes 1,024 bytes of a bucket. The difference is larger than the tensors."""

    async def receive(message, version, last):
        unreachable(message, 0)
        if message["units"]:
            sent.append(len(message["memory"]["data"]))

    sent = []
    monkeypatch.setattr(engine, "receive", receive)
    for version in (1, 2, 3):
        sent.clear()
        units = [Encoded(f"t{i}", {f"t{i}": torch.randint(0, 256, (24,)).byte()}) for i in range(500)]
        report = asyncio.run(transport.send(iter(units), version))
        assert report.nbytes == sum(sent) > sum(u.nbytes for u in units)


@pytest.mark.parametrize("staged", [False, True], ids=["in turn", "staged"])
def test_a_bit_that_flips_in_shared_memory_before_the_message_is_found(
    engine, checkpoints, shared_memory, monkeypatch, staged
):
    """In every bucket of a version that stays, of large versions too, and wherever in the bucket."""
    monkeypatch.setattr(sender, "PIECE", SMALL)
    transport = BucketTransport(engine, World(), SMALL, staging=staged, stay=True)
    units = stored_units(checkpoints[1])

    async def push(version):
        if staged:
            await transport.stage(iter(units), version)
        await transport.send(iter(() if staged else units), version)

    for version in (1, 2):
        asyncio.run(push(version))
    buckets = len(engine.received) // 2
    found = tried = 0
    for number in range(buckets):
        for place in (0.0, 0.3, 0.6, 0.999):
            asyncio.run(push(3))  # one that arrives, so that versions stay again

            async def flip(message, version, last, number=number, place=place):
                nonlocal tried
                where = message.get("memory", {})
                if where.get("stays") and message["number"] == number and message["units"]:
                    await asyncio.sleep(0.02)  # whoever reads along has read it
                    offset = where["start"] + int(place * (message["nbytes"] - 1))
                    with open(where["path"], "r+b") as file:
                        file.seek(offset)
                        byte = file.read(1)[0]
                        file.seek(offset)
                        file.write(bytes([byte ^ 1 << 6]))
                    tried += 1
                await type(engine).receive(engine, message, version, last)

            with monkeypatch.context() as patch:
                patch.setattr(engine, "receive", flip)
                before = tried
                try:
                    asyncio.run(push(4))
                except SyncError as error:
                    assert "checksum" in str(error)
                    found += 1
            if tried == before:
                break
            asyncio.run(push(5))
    assert tried >= 8 and found == tried
    transport.close()
