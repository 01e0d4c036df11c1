"""Calls that are timed, bounded and counted."""

from __future__ import annotations

import asyncio
import gc
import pickle
import time

import pytest

from miles_core.contracts.engine import Engine
from miles_core.errors import DataError, MilesError, MismatchError, NonFiniteError, PlanError, SyncError, WorkerLost
from miles_core.train.rank import Rank
from miles_testing.doubles import remote
from miles_workers.busy_time import BusyTime
from miles_workers.engine_worker import EngineWorker
from miles_workers.rank_worker import RankWorker
from miles_workers.restarts import Restarts
from miles_workers.timeouts import Timeouts
from miles_workers.workers import await_all, require_agreement


def test_a_worker_that_does_not_answer_is_lost(recorded):
    async def main():
        workers = recorded(["engine-0"], {"generate": lambda number: asyncio.sleep(10)}, timeouts=Timeouts(0.02))
        with pytest.raises(WorkerLost, match=r"worker engine-0 was lost: it did not answer 'generate' within 0.02 s"):
            await workers.call(0, Engine.generate)

    asyncio.run(main())


def test_building_has_a_timeout_of_its_own(recorded, toy_run):
    async def main():
        workers = recorded(["trainer-0"], {"build": lambda number, *_: asyncio.sleep(10)}, timeouts=Timeouts(60, 0.02))
        with pytest.raises(WorkerLost, match=r"worker trainer-0 was lost: it did not answer 'build' within 0.02 s"):
            await workers.call(0, RankWorker.build)

    asyncio.run(main())
    toy_run(
        [remote.__file__], runtime="remote", steps=1, worker_timeout=50, worker_build_timeout=70, worker_heartbeat=3
    )
    assert remote.latest().timeouts == Timeouts(50, 70, 3)


def test_a_timeout_inside_of_a_call_is_its_own(recorded):
    def late(number):
        raise TimeoutError("a judge")

    with pytest.raises(TimeoutError, match="a judge"):
        asyncio.run(recorded(["engine-0"], {"generate": late}, timeouts=Timeouts(5.0)).call(0, Engine.generate))


class StrangeError(Exception):
    """Of a plugin; its message is not its first argument."""

    def __init__(self, code):
        super().__init__(code)

    def __str__(self):
        return f"code {self.args[0]}"


def named(worker, error):
    error.worker = worker
    return error


@pytest.mark.parametrize(
    ("raised", "match"),
    [
        (PlanError("made by another version"), "^worker engine-0: made by another version$"),
        (DataError("bad"), "^worker engine-0: bad$"),
        (NonFiniteError("a loss"), "^worker engine-0: a loss$"),
        (SyncError("lost"), "^worker engine-0: lost$"),
        (MismatchError("too far", gap=3), "^worker engine-0: too far$"),
        (ValueError("a shape"), "^a shape\nraised in worker engine-0$"),
        (named("engine-3", SyncError("lost")), "^worker engine-3: lost$"),
        (KeyError("name"), "name"),
        (OSError(2, "no such file", "x"), "no such file"),
        (StrangeError(3), "code 3"),
    ],
)
def test_every_error_names_the_worker_and_keeps_its_class(recorded, raised, match):
    def fail(number):
        raise raised

    with pytest.raises(type(raised), match=match) as found:
        asyncio.run(recorded(["engine-0"], {"build": fail}).call(0, EngineWorker.build))
    assert "worker engine" in "\n".join([str(found.value), *getattr(found.value, "__notes__", ())])
    assert getattr(found.value, "gap", 3) == 3
    if isinstance(raised, MilesError):
        again = pickle.loads(pickle.dumps(found.value))
        assert again.worker == found.value.worker != "" and str(again) == str(found.value)


def test_a_worker_without_memory_is_named_with_what_to_do(recorded):
    def fail(number):
        raise MemoryError("Tried to allocate 2 GiB")

    with pytest.raises(MilesError, match=r"^worker engine-0: not enough memory \(Tried to"):
        asyncio.run(recorded(["engine-0"], {"build": fail}).call(0, EngineWorker.build))


def test_a_worker_that_hangs_is_lost_while_its_call_has_time(recorded):
    async def main():
        never = asyncio.Event()
        workers = recorded(["a", "b"], {"learn": lambda number: never.wait()}, timeouts=Timeouts(60, 60, 0.1))
        for number in range(2):
            await workers.start(number)
        workers.hung = {1}
        with pytest.raises(WorkerLost, match=r"worker b was lost: it gave no sign of life for 0\.1 s"):
            await asyncio.wait_for(workers.call(1, Rank.learn), 5)
        assert workers.dead == {1} and 0 not in workers.lost
        with pytest.raises(WorkerLost, match="no sign of life"):  # and at once, whatever it is asked
            await asyncio.wait_for(workers.call(1, Rank.learn), 1)
        await workers.start(1)
        workers.answers["learn"] = 3
        workers.hung = set()
        assert await workers.call(1, Rank.learn) == 3
        await workers.end()

    asyncio.run(main())


def test_a_hung_worker_is_found_at_once_when_a_run_is_out_of_time(recorded):
    async def main():
        never = asyncio.Event()
        workers = recorded(["a", "b"], {"is_intact": lambda number: never.wait()}, timeouts=Timeouts(60, 60, 60))
        for number in range(2):
            await workers.start(number)
        workers.hung = {1}
        assert await asyncio.gather(*(workers.await_beat(number, 0.1) for number in range(2))) == [True, False]
        assert workers.dead == {1}
        with pytest.raises(WorkerLost, match=r"worker b was lost: it gave no sign of life for 0\.1 s"):
            await asyncio.wait_for(workers.call(1, Rank.is_intact), 1)
        await workers.end()

    asyncio.run(main())


def test_a_driver_that_is_busy_blames_no_worker(recorded):
    async def main():
        workers = recorded(["a"], {"learn": lambda number: asyncio.sleep(0.01, 3)}, timeouts=Timeouts(0.2, 0.2, 0.2))
        await workers.start(0)
        asking = asyncio.create_task(workers.call(0, Rank.learn))
        await asyncio.sleep(0)
        time.sleep(1.0)  # a reward function that blocks, or a driver that was stopped
        assert await asking == 3 and not workers.lost
        await workers.end()

    asyncio.run(main())


def test_a_heartbeat_that_fails_as_its_watch_ends_leaves_no_message(recorded, caplog):
    async def main():
        workers = recorded(["a"], timeouts=Timeouts(60, 60, 60))

        async def beat(number):
            workers.unwatch(number)
            raise WorkerLost("a", "it was killed")

        workers.beat = beat
        await workers.start(0)
        await asyncio.sleep(0.05)

    asyncio.run(main())
    gc.collect()  # asyncio logs an error that was never retrieved when its task is deleted
    assert not caplog.text


def test_a_worker_that_computes_without_answering_heartbeats_is_not_lost(recorded):
    async def main():
        workers = recorded(["a"], {"save": lambda number: asyncio.sleep(0.5, 3)}, timeouts=Timeouts(60, 60, 0.05))

        async def computes(number):
            return True

        workers.computes = computes
        await workers.start(0)
        workers.hung = {0}
        assert await workers.call(0, Rank.save) == 3
        await workers.end()

    asyncio.run(main())


def test_the_one_that_makes_others_wait_is_blamed(recorded):
    async def main():
        never = asyncio.Event()
        ranks = recorded(
            ["trainer-0", "trainer-1"], {"push": lambda number: never.wait()}, timeouts=Timeouts(0.1), trains=True
        )
        engines = recorded(["engine-0"])
        ranks.peers = engines.peers = [ranks, engines]
        ranks.waits[0] = ("engine-0",)
        with pytest.raises(
            WorkerLost, match="worker engine-0 was lost: trainer-0 waited for it and did not answer 'push'"
        ) as found:
            await ranks.call(0, RankWorker.push)
        assert not found.value.trains and engines.dead == {0} and not ranks.dead
        engines.lost.clear()
        engines.waits[0] = ("trainer-1",)  # which has not sent its part
        with pytest.raises(WorkerLost, match="worker trainer-1 was lost: trainer-0 waited for it"):
            await ranks.call(0, RankWorker.push)

    asyncio.run(main())


def test_of_calls_that_fail_together_the_lost_worker_is_told(recorded):
    async def main():
        async def lost():
            await asyncio.sleep(0.05)
            raise WorkerLost("trainer-1", "it was killed")

        async def complain():
            raise RuntimeError("connection closed by peer")

        async def late():
            await asyncio.sleep(60)

        with pytest.raises(WorkerLost, match="trainer-1"):
            await asyncio.wait_for(await_all([complain(), lost(), late()]), 5)
        assert await await_all([asyncio.sleep(0.01, 1), asyncio.sleep(0, 2)]) == [1, 2]

    asyncio.run(main())


def test_overlapping_calls_count_once():
    busy = BusyTime()
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
        WorkerLost, match=r"it was killed, and 1 workers were replaced before \(--max-restarts 1\)"
    ) as raised:
        restarts.spend(lost)
    assert raised.value.lines == ("out of", "luck")


def test_a_lost_worker_is_told_across_processes():
    lost = WorkerLost("trainer-1", "its process died", ("last line",), True)
    again = pickle.loads(pickle.dumps(lost))
    assert str(again) == str(lost) == "worker trainer-1 was lost: its process died; its last lines:\n  last line"
    assert again.trains and again.worker == "trainer-1"


def test_workers_must_agree():
    assert require_agreement("x", {"a": 1, "b": 1}) == 1
    with pytest.raises(RuntimeError, match="x differs: a has 1, b has 2"):
        require_agreement("x", {"a": 1, "b": 2})


def test_a_worker_that_gives_up_is_named_by_who_asked_it(recorded):
    def give_up(number):
        raise WorkerLost("", "its engine ended", ("last words",))

    with pytest.raises(WorkerLost, match=r"(?s)worker engine-1 was lost: its engine ended.*\n  last words"):
        asyncio.run(recorded(["engine-0", "engine-1"], {"generate": give_up}).call(1, Engine.generate))
