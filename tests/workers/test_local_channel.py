"""Messages between processes of one machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import threading

import numpy as np
import pytest

from miles_core.errors import MilesError
from miles_workers import local_channel
from miles_workers.local_channel import SHARED, Channel, Message, receive


def pass_on(value):
    """Send ``value`` through a pair of sockets; returns it and the message."""
    here, there = socket.socketpair()
    with here, there:
        message = Message(value)
        sender = threading.Thread(target=message.send, args=(here,))
        sender.start()
        found = receive(there)
        sender.join()
    return found, message


def test_large_arrays_travel_in_shared_memory_and_stay_when_the_message_is_gone():
    arrays = [np.random.default_rng(n).integers(0, 99, (SHARED + n, 2), np.int16) for n in range(3)]
    small, empty = np.arange(3.0), np.zeros((0, 4))
    found, message = pass_on({"rows": arrays, "small": small, "empty": empty, "text": "x" * 100_000})
    assert len(message.buffers) == 3 and 100_000 < len(message.data) < 102_000
    for one, other in zip([*found["rows"], found["small"], found["empty"]], [*arrays, small, empty], strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    kept = found["rows"][1]
    del found, message
    kept += 1
    assert np.array_equal(kept, arrays[1] + 1)


def test_arrays_in_any_order_and_more_than_one_system_call_writes():
    turned = np.arange(40_000, dtype=np.float32).reshape(200, 200).T
    strided = np.arange(80_000, dtype=np.int32)[::2]
    found, _ = pass_on([turned, strided, *(np.full(SHARED, n % 256, np.uint8) for n in range(1100))])
    assert np.array_equal(found[0], turned) and np.array_equal(found[1], strided)
    assert [int(array[-1]) for array in found[2:]] == [n % 256 for n in range(1100)]


def test_without_shared_memory_arrays_are_part_of_the_pickle(monkeypatch):
    monkeypatch.delattr(local_channel.os, "memfd_create")
    array = np.arange(SHARED)
    found, message = pass_on(array)
    assert not message.buffers and np.array_equal(found, array)


def test_both_ends_send_at_once_and_learn_of_the_end():
    """Messages larger than the buffers of a socket in both directions do not block each other."""
    here, there = socket.socketpair()
    results = [queue.SimpleQueue(), queue.SimpleQueue()]
    ends = [
        Channel(end, lambda value, error, to=to: to.put((value, error)))
        for end, to in zip((here, there), results, strict=True)
    ]
    for end in ends:
        end.start()
    sent = ["x" * 3_000_000, np.arange(100_000)]
    for end in ends:
        for value in sent:
            end.send(Message(value))
    for result in results:
        (text, _), (array, _) = result.get(timeout=20), result.get(timeout=20)
        assert text == sent[0] and np.array_equal(array, sent[1])
    ends[0].close()
    for result in results:
        assert isinstance(result.get(timeout=20)[1], (EOFError, OSError))
    for end in ends:
        end.close()
        end.join()


def test_what_cannot_be_read_is_reported():
    here, there = socket.socketpair()
    result = queue.SimpleQueue()
    channel = Channel(there, lambda value, error: result.put(error))
    channel.start()
    message = Message(None)
    message.data = b"cno_such_module\nThing\n."
    with here:
        message.send(here)
        assert isinstance(result.get(timeout=20), ModuleNotFoundError)
    channel.close()
    channel.join()


HEAD = local_channel._HEAD.pack


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files as Linux lists them")
@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([(HEAD(9, 1, 0), 1)], EOFError),  # it ends after the memory of its arrays
        ([(HEAD(9, 0, 2), 0)], EOFError),  # before the descriptors of its objects
        ([(HEAD(9, 0, 2), 0), (b" ", 2)], EOFError),  # after them
        ([(HEAD(9, 0, 2), 0), (b" ", 1)], MilesError),
        ([(HEAD(9, 1, 0), 0)], MilesError),
        ([(HEAD(5, 0, 1), 0), (b" ", 3), (pickle.dumps(7), 0)], None),
        ([(HEAD(5, 0, 0), 1), (pickle.dumps(7), 0)], None),
        ([(HEAD(24, 0, 2), 0), (b" ", 2), (b"cno_such_module\nThing\n.?", 0)], ModuleNotFoundError),
    ],
)
def test_a_message_with_fewer_or_more_descriptors_leaves_none_open(parts, error):
    here, there = socket.socketpair()
    with there:
        with here, open(os.devnull) as file:
            for data, count in parts:
                socket.send_fds(here, [data], [file.fileno()] * count)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(error) if error else contextlib.nullcontext():
            receive(there)
        assert os.listdir("/proc/self/fd") == before


def test_what_pickle_cannot_serialize_is_raised_at_once():
    with pytest.raises(TypeError, match="lock"):
        Message(threading.Lock())
