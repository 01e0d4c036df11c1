"""Calls that are timed, bounded and counted."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from miles_core.errors import MilesError, PlanError, WorkerLost
from miles_core.remote.workers import Busy, Restarts, agreed


def test_a_worker_that_does_not_answer_is_lost(recorded):
    async def main():
        workers = recorded(["engine-0"], {"generate": lambda number: asyncio.sleep(10)}, patience=0.02)
        with pytest.raises(WorkerLost, match=r"worker engine-0 was lost: it did not answer 'generate' within 0.02 s"):
            await workers.call(0, "generate")

    asyncio.run(main())


def test_a_timeout_inside_of_a_call_is_its_own(recorded):
    def late(number):
        raise TimeoutError("a judge")

    with pytest.raises(TimeoutError, match="a judge"):
        asyncio.run(recorded(["engine-0"], {"generate": late}, patience=5).call(0, "generate"))


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (PlanError("made by another version"), (PlanError, "worker engine-0: made by another version")),
        (MemoryError("Tried to allocate 2 GiB"), (MilesError, r"worker engine-0 has not enough memory \(Tried to")),
    ],
)
def test_what_a_user_can_mend_names_the_worker(recorded, raised, told):
    def fail(number):
        raise raised

    with pytest.raises(told[0], match=told[1]):
        asyncio.run(recorded(["engine-0"], {"build": fail}).call(0, "build"))


def test_overlapping_calls_count_once():
    busy = Busy()
    with busy.at("a"), busy.at("a"):
        assert busy.open("a") == 2
    with busy.at("b"):
        found = busy.metrics()
    assert 0 <= found["busy/a"] <= found["busy/b"] + found["busy/a"] and found["idle/a"] <= 1
    assert busy.metrics()["busy/a"] == 0


def test_the_last_restart_says_what_was_used_up():
    restarts, lost = Restarts(1), WorkerLost("engine-0", "it was killed", ("out of", "luck"))
    restarts.spend(lost)
    with pytest.raises(
        WorkerLost, match=r"it was killed, and 1 workers were replaced before it \(--max-restarts 1\)"
    ) as raised:
        restarts.spend(lost)
    assert raised.value.lines == ("out of", "luck")


def test_a_lost_worker_is_told_across_processes():
    lost = WorkerLost("trainer-1", "its process died", ("last line",), True)
    again = pickle.loads(pickle.dumps(lost))
    assert str(again) == str(lost) == "worker trainer-1 was lost: its process died; its last lines:\n  last line"
    assert again.trains and again.worker == "trainer-1"


def test_workers_must_agree():
    assert agreed("x", {"a": 1, "b": 1}) == 1
    with pytest.raises(RuntimeError, match="x differs: a has 1, b has 2"):
        agreed("x", {"a": 1, "b": 2})


def test_a_worker_that_gives_up_is_named_by_who_asked_it(recorded):
    def give_up(number):
        raise WorkerLost("", "its engine ended", ("last words",))

    with pytest.raises(WorkerLost, match=r"(?s)worker engine-1 was lost: its engine ended.*\n  last words"):
        asyncio.run(recorded(["engine-0", "engine-1"], {"generate": give_up}).call(1, "generate"))
