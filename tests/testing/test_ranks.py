"""Ranks in tests: their results, and the error if they fail."""

import os
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from miles_testing.ranks import RankError, Ranks


def added(own):
    total = torch.tensor(own)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


class Doubling:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, value):
        return self.factor * value


def failing_on_one():
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def sleeping():
    time.sleep(60)


def ending():
    os._exit(3)


def process():
    return os.getpid()


def starting_another():
    return subprocess.Popen(["sleep", "60"]).pid


def ended(pid):
    """Whether a process that is no child of this one is gone, soon."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_each_call_has_a_group_of_its_size(ranks):
    assert ranks.run(added, size=2, each=[(1,), (20,)]) == [(0, 2, 21), (1, 2, 21)]
    assert ranks.run(added, 7, size=1) == [(0, 1, 7)]
    assert ranks.run(Doubling(3).apply, torch.ones(2))[1].tolist() == [3, 3]


@pytest.mark.thorough
def test_processes_are_kept_and_ended():
    mine = Ranks(timeout=1.0)
    first = mine.run(process)
    assert mine.run(process) == first
    with pytest.raises(RankError, match=r"rank 1 of 2: (.|\n)*only here"):
        mine.run(failing_on_one)
    second = mine.run(process)
    assert not set(first) & set(second)
    others = mine.run(starting_another)
    with pytest.raises(RankError, match=r"rank 0, 1 of 2 did not answer(.|\n)*in sleeping"):
        mine.run(sleeping)
    with pytest.raises(RankError, match="rank 0 of 1: the process ended with status 3"):
        mine.run(ending, size=1)
    mine.close()
    for pid in {*first, *second}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert all(map(ended, others))
