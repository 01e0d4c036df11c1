"""Samples whose data stays where it was produced."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import pickle
import socket
import threading

import numpy as np
import pytest

from miles_core.data import Field, Sample
from miles_core.data.batch import collate
from miles_core.data.sample import Status
from miles_core.errors import DataError
from miles_core.train.data_shard import DataShard, divide_samples
from miles_workers.local_channel import Message, receive
from miles_workers.object_ref import ObjectRef
from miles_workers.remote_sample import SENT, RemoteSample, heads, pack_samples, read_samples, refer
from miles_workers.sample_list import SampleList, pack_shard

ROUTES = Field("routes", "int16", "token-1", pad=-1, shape=(None, None))


def group(size=3, length=3000):
    random = np.random.default_rng(0)
    return [
        Sample(
            prompt="a question",
            tokens=random.integers(0, 99, 5 + length).tolist(),
            response="an answer",
            response_length=length,
            reward={"a": 1.0, "b": float(number)},
            loss_mask=[1] * length,
            status=Status.COMPLETED,
            metadata={"n": number},
            rollout_log_probs=(-random.exponential(1.0, length)).tolist(),
            weight_versions=[(0, 4)],
            group_index=7,
            index=20 + number,
            rollout_id=20,
            policy="one",
            fields={"routes": random.integers(0, 9, (4 + length, 3, 2)).astype(np.int16)},
        )
        for number in range(size)
    ]


def same(left, right):
    """Compare all attributes; arrays of fields have no truth value."""
    for one, other in zip(left, right, strict=True):
        for each in dataclasses.fields(Sample):
            if each.name != "fields":
                assert getattr(one, each.name) == getattr(other, each.name), each.name
        assert one.fields.keys() == other.fields.keys()
        for name, value in one.fields.items():
            assert value.dtype == other.fields[name].dtype and np.array_equal(value, other.fields[name])


def send(value):
    """Send a value through the sockets of two processes of one machine."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message = Message(value)
        thread = threading.Thread(target=message.send, args=(ours,))
        thread.start()
        found = receive(theirs)
        thread.join()
    return found, len(message.data)


def open_files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


class Reading:
    """An object reference that counts how often it is read."""

    def __init__(self, ref):
        self.ref, self.count = ref, 0

    def read(self):
        self.count += 1
        return self.ref.read()


def test_what_the_driver_does_reads_nothing():
    samples = group()
    stored = Reading(pack_samples(samples))
    found = refer(heads(samples), stored)
    assert all(type(sample) is RemoteSample for sample in found)
    for name in SENT:
        assert [getattr(s, name) for s in found] == [getattr(s, name) for s in samples]
    assert [s.prompt_length for s in found] == [5] * 3
    assert divide_samples(found, [0, 0, 0], 2) == divide_samples(samples, [0, 0, 0], 2)
    found[1].reward, found[1].remove_sample = 5.0, True
    copied = copy.copy(found[1])
    assert stored.count == 0
    assert copied.tokens == samples[1].tokens and (copied.reward, copied.remove_sample) == (5.0, True)
    assert stored.count == 1 and type(copied) is Sample and type(found[1]) is RemoteSample


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Sample) if f.name not in (*SENT, "fields")])
def test_any_other_attribute_makes_it_a_plain_sample(name):
    samples = group()
    stored = Reading(pack_samples(samples))
    found = refer(heads(samples), stored)
    getattr(found[0], name)
    setattr(found[1], name, getattr(samples[1], name))
    assert [type(s) for s in found] == [Sample, Sample, RemoteSample]
    assert found[2].routes.shape == (3004, 3, 2), "a field is read like an attribute"
    same(found, samples)
    assert stored.count == 1
    assert vars(found[0]).keys() == vars(samples[0]).keys()
    with pytest.raises(AttributeError, match="no attribute or field 'nothing'"):
        refer(heads(samples), stored)[0].nothing  # noqa: B018


def test_fields_that_the_driver_sets_are_sent_with_the_reference():
    """As a teacher and a critic do (``wrap_learn``)."""
    samples = group()
    stored = Reading(pack_samples(samples))
    found = refer(heads(samples), stored)
    values = np.arange(3000, dtype=np.float32)
    for sample in found:
        sample.fields["values"] = values
        sample.fields |= {"teacher": -values, "routes": None}
        assert sample.fields["teacher"] is not None and sample.fields["routes"] is None
    copied = copy.copy(found[0])
    assert stored.count == 0 and {type(sample) for sample in found} == {RemoteSample}
    for sample, original in zip(pickle.loads(pickle.dumps(refer_to_ref(found, stored.ref))), samples, strict=True):
        assert sample.tokens == original.tokens and type(sample) is Sample
        assert sample.fields.keys() == {"routes", "values", "teacher"} and sample.fields["routes"] is None
        assert np.array_equal(sample.fields["values"], values) and np.array_equal(sample.teacher, -values)
    before = found[0].fields
    assert before.get("other") is None and type(found[0]) is Sample, "other entries are read"
    before["other"] = 1
    assert found[0].fields["other"] == 1 and dict(before) == found[0].fields and "other" not in copied.fields
    assert found[1].fields.keys() == {"routes", "values", "teacher"} and len(found[1].fields) == 3
    found[2].fields = {"only": 1}
    assert found[2].fields == {"only": 1} and samples[2].fields.keys() == {"routes"}


def refer_to_ref(found, ref):
    """The samples with a reference that can be sent."""
    for sample in found:
        sample.__dict__["_group"].stored = ref
    return found


def test_copies_comparisons_and_batches_are_those_of_plain_samples():
    samples = group()
    for sample in samples:
        sample.fields = {}

    def made():
        return refer(heads(samples), pack_samples(samples))

    assert made() == samples and samples == made() and made() == made() and made()[0] != samples[1]
    assert dataclasses.replace(made()[0], index=3) == dataclasses.replace(samples[0], index=3)
    assert copy.deepcopy(made()) == samples == pickle.loads(pickle.dumps(made()))
    samples = group()
    left, right = collate(refer(heads(samples), pack_samples(samples)), [ROUTES]), collate(samples, [ROUTES])
    assert left.columns.keys() == right.columns.keys()
    for name, column in right.columns.items():
        assert column.equal(left.columns[name])
    assert left.tokens.equal(right.tokens)


def test_messages_pass_descriptors_and_the_memory_is_freed_with_the_last_holder():
    before = open_files()
    samples = group()
    (sent, ref), size = send((heads(samples), pack_samples(samples)))
    assert size < 1200 and not ref._buffers, "neither the message nor the receiver contains the data"
    assert send((heads(group(3, 60_000)), pack_samples(group(3, 60_000))))[1] < size + 30, (
        "nothing grows with the tokens"
    )
    assert open_files() == before + 1
    (again, _), size = send((refer(sent, ref), 0))
    assert size < 1500 and open_files() == before + 2
    del ref
    assert open_files() == before + 1, "a process that passed the group on is not needed any more"
    same(again, samples)
    assert not np.shares_memory(again[0].routes, samples[0].routes)
    again[0].routes[0] = 3  # memory of this process only
    del again
    assert open_files() == before


def test_one_message_may_hold_hundreds_of_groups():
    before = open_files()
    refs = [pack_samples(group(1, 1000 + number)) for number in range(300)]
    found, _ = send([*refs, refs[0]])
    assert [len(ref.read()[0].tokens) for ref in found] == [*range(1005, 1305), 1005]
    assert found[0] is found[300]
    del found, refs
    assert open_files() == before


def test_small_groups_are_part_of_the_message():
    before = open_files()
    ref, _ = send(pack_samples([Sample(index=3, tokens=[1, 2])]))
    assert open_files() == before and read_samples(ref) == [Sample(index=3, tokens=[1, 2])]


def test_samples_that_cannot_be_sent_are_named():
    sample = Sample(index=7, metadata={"lock": threading.Lock()})
    with pytest.raises(DataError, match=r"sample 7: metadata\['lock'\] is a lock, which cannot be sent"):
        pack_samples([sample])
    with pytest.raises(DataError, match="keep plain data there"):
        read_samples(ObjectRef([np.frombuffer(b"\x80\x04cmissing_module\nThing\n.", np.uint8)]))


def test_large_fields_are_not_copied():
    routes, small = np.arange(60_000, dtype=np.int16).reshape(-1, 3, 2), np.arange(4.0)
    packed = pack_samples([Sample(index=3, tokens=[1, 2], fields={"routes": routes, "small": small})])
    assert packed.sizes[0] < 2000 and packed.sizes[1:] == (routes.nbytes,)
    assert np.shares_memory(packed.buffers[1], routes)
    (sample,) = read_samples(packed)
    for name, array in (("routes", routes), ("small", small)):
        assert sample.fields[name].dtype == array.dtype and np.array_equal(sample.fields[name], array)
    assert np.shares_memory(sample.fields["routes"], routes)


def several(count=4, size=3):
    """Groups, the same as references, and their object references, which count reads."""
    groups = [group(size, 3000 + number) for number in range(count)]
    refs = [pack_samples(each) for each in groups]
    return groups, [sample for each, ref in zip(groups, refs, strict=True) for sample in refer(heads(each), ref)]


def test_a_list_of_references_arrives_as_the_samples():
    groups, found = several()
    found[1].reward, found[1].remove_sample = 5.0, True
    found[4].weight_versions.append((7, 5))
    found[5].reward["a"] = 3.0
    found[6].fields["values"] = np.arange(3.0)
    assert found[8].tokens and type(found[8]) is Sample
    mixed = [*found[:5], *found[6:], found[5], Sample(index=99, tokens=[1])]
    ((received,), _) = send([SampleList(mixed)])
    assert type(received) is list and len(received) == 13
    received[0].response_length  # noqa: B018
    assert type(received[0]) is Sample, "other processes read what the driver has not changed"
    originals = [sample for each in groups for sample in each]
    originals[1] = dataclasses.replace(originals[1], reward=5.0, remove_sample=True)
    originals[4] = dataclasses.replace(originals[4], weight_versions=[(0, 4), (7, 5)])
    originals[5] = dataclasses.replace(originals[5], reward={"a": 3.0, "b": 2.0})
    originals[6] = dataclasses.replace(originals[6], fields=originals[6].fields | {"values": np.arange(3.0)})
    same(received[:12], [*originals[:5], *originals[6:], originals[5]])
    assert received[12] == Sample(index=99, tokens=[1])
    assert [s.prompt_length for s in several()[1]] == [5] * 12


def test_samples_of_a_group_share_one_read_and_one_descriptor():
    before = open_files()
    _, found = several(2)
    (received,), _ = send([SampleList([found[0], found[3], found[1], found[4]])])
    groups = [sample.__dict__["_group"] for sample in received]
    assert groups[0] is groups[2] and groups[1] is groups[3] and groups[0] is not groups[1]
    assert open_files() == before + 4, "two groups in two processes"


def test_the_number_of_bytes_of_a_share_does_not_depend_on_what_samples_contain():
    sizes = {}
    for count in (10, 100):
        samples = [
            Sample(tokens=[1] * 5000, response_length=4000, group_index=n, index=8 * n + i, rollout_id=8 * n + i)
            for n in range(count)
            for i in range(8)
        ]
        refs = [pack_samples(samples[start : start + 8]) for start in range(0, len(samples), 8)]
        found = [one for n, ref in enumerate(refs) for one in refer(heads(samples[8 * n : 8 * n + 8]), ref)]
        shard = DataShard(found, [0] * len(found), 1, [*range(len(found))], 0)
        sizes[count], received = send(pack_shard(shard))[1], send(pack_shard(shard))[0]
        assert received.step_of == shard.step_of and received.positions == shard.positions
        assert [s.index for s in received.samples] == [s.index for s in samples]
    assert sizes[100] - sizes[10] < 90 * 8, "less than a byte per sample"
