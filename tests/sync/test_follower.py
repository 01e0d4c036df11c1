"""Adding up what another process writes: beside it, and what is left at the end."""

from __future__ import annotations

import time

import pytest
import torch

from miles_core.sync import follower as module
from miles_core.sync import inbox as inbox_module
from miles_core.sync.checksum import BLOCK, checksum
from miles_core.sync.follower import Follower
from miles_core.sync.inbox import Inbox


@pytest.fixture
def memory():
    """Bytes, and how many of them are there."""
    return torch.randint(0, 256, (40 * BLOCK,), dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)


def until(done):
    end = time.monotonic() + 30
    while not done() and time.monotonic() < end:
        time.sleep(0.001)
    assert done()


def test_what_is_written_is_added_up_before_anybody_asks(memory, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 4 * BLOCK)
    flat, count = memory
    follower = Follower(flat, count)
    for end in (10 * BLOCK, 25 * BLOCK + 7):  # whole blocks of it
        count.view(torch.int64)[0] = end
        until(lambda end=end: follower._done == end // BLOCK * BLOCK)
    flat[: 20 * BLOCK] += 1  # of no matter any more
    assert follower.sum(20 * BLOCK).of(20 * BLOCK) == checksum(flat[20 * BLOCK :])
    assert follower.sum(0).of(20 * BLOCK) == checksum(flat[: 20 * BLOCK] - 1)
    follower.stop()


def test_who_stopped_or_lost_patience_makes_up_for_it(memory, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    flat, count = memory
    follower = Follower(flat, count)
    until(lambda: not follower._thread.is_alive())
    count.view(torch.int64)[0] = 40 * BLOCK
    assert follower.sum(8 * BLOCK).of(32 * BLOCK) == checksum(flat[8 * BLOCK :])


def test_a_version_that_is_begun_again_is_followed_once(monkeypatch):
    class Told:
        def __init__(self, flat, count):
            made.append(self)
            self.stopped = False

        def stop(self):
            self.stopped = True

    made, inbox = [], Inbox()
    monkeypatch.setattr(inbox_module, "Follower", Told)
    monkeypatch.setattr(inbox, "_attached", lambda where, how: torch.zeros(4 * BLOCK, dtype=torch.uint8))
    stopped = []
    for key in ("a", "b", "a"):
        inbox._follow({"key": key})
        stopped.append([follower.stopped for follower in made])
    inbox.finish()
    assert stopped == [[False], [False, False], [True, False, False]] and all(follower.stopped for follower in made)
