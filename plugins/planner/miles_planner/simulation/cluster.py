"""The workers of a simulated run: virtual engines and one virtual trainer behind core's own pools.

Requests pass through ``EnginePool`` with its mailboxes, training and weight syncs through ``LearnerGroup``; a failed engine is replaced
by the code that replaces it in a real run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from miles_core.contracts.engine import PauseMode
from miles_core.contracts.run import Policy, Run
from miles_core.contracts.runtime import PolicyParts, Runtime
from miles_core.contracts.transport import SyncReport
from miles_core.data.world import ALONE
from miles_core.errors import WorkerLost
from miles_core.precision.schedule import precisions
from miles_core.train.data_shard import DataShard
from miles_planner.simulation.engine import VirtualEngine
from miles_planner.simulation.ledger import Ledger, Timeline
from miles_planner.simulation.setup import Setup
from miles_workers.engine_pool import EnginePool
from miles_workers.inbox import Answers, Inbox, Letters
from miles_workers.learner_group import LearnerGroup
from miles_workers.rank_worker import RankWorker
from miles_workers.workers import Workers

#: The facts that an ``EngineWorker`` reports about its engine.
_BUILD_INFO = {"capabilities": frozenset(), "kv_cache_dtype": "", "native_products": False, "model_facts": {}}

#: Calls of an engine that take virtual time.
_WAITING = frozenset({"answers", "sleep", "wake"})


class EngineWorkers(Workers):
    """The engines, called without serialization.

    Attributes:
        engines: the current engines; a replaced one is another object.
        past_busy, past_occupied: sums of the replaced engines' counts.
        failures: number of failed engines.
    """

    def __init__(self, setup: Setup, ledger: Ledger, slots: int) -> None:
        super().__init__([f"engine-{number}" for number in range(setup.engines)])
        self.setup, self.ledger, self.slots = setup, ledger, slots
        self.past_busy = self.past_occupied = 0.0
        self.failures = 0
        self.engines = [self._make() for _ in self.names]
        self._inboxes = [Inbox(engine.generate) for engine in self.engines]
        self._push = [0] * setup.engines
        self._ended: set[int] = set()

    @property
    def busy_seconds(self) -> float:
        """Seconds in which engines computed, summed over the engines."""
        return self.past_busy + sum(engine.busy for engine in self.engines)

    @property
    def occupied_seconds(self) -> float:
        """Sum, over all requests and engines, of the seconds in which the request was decoded."""
        return self.past_occupied + sum(engine.occupied for engine in self.engines)

    async def call(self, number: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if method.__name__ in _WAITING:
            return await super().call(number, method, *args, **kwargs)
        # takes no virtual time; with thousands of engines, tasks would dominate the real time
        return self._answer(number, method.__name__, *args)

    async def send(self, number: int, method: str, *args: Any) -> Any:
        answer = self._answer(number, method, *args)
        return await answer if method in _WAITING else answer

    def _answer(self, number: int, method: str, *args: Any) -> Any:
        if number in self._ended:
            raise self.lost_error(number, "it failed as simulated")
        return getattr(self, f"_do_{method}")(number, *args)

    async def restart(self, number: int) -> None:
        await asyncio.sleep(self.setup.restart)
        self.engines[number] = self._make()
        self._inboxes[number] = Inbox(self.engines[number].generate)
        self._ended.discard(number)

    async def kill(self, number: int) -> None:
        self._ended.add(number)
        engine = self.engines[number]
        engine.stop()
        self.past_busy, self.past_occupied = self.past_busy + engine.busy, self.past_occupied + engine.occupied
        engine.busy = engine.occupied = 0.0

    async def fail(self, number: int) -> None:
        """Let an engine fail, unless it already failed."""
        if number not in self._ended:
            self.failures += 1
            await self.declare_lost(number, "it failed as simulated")

    def _make(self) -> VirtualEngine:
        return VirtualEngine(self.setup.speed, self.ledger, self.slots)

    def _do_post(self, number: int, client: str, letters: Letters) -> None:
        self._inboxes[number].post(letters)

    async def _do_answers(self, number: int, client: str) -> Answers:
        return await self._inboxes[number].answers()

    def _do_begin_push(self, number: int, push: int, senders: Sequence[str]) -> None:
        self._push[number] = push

    def install(self, push: int, version: int) -> None:
        """Let all engines serve ``version``. Raises WorkerLost if one of them failed."""
        for number, engine in enumerate(self.engines):
            if number in self._ended:
                raise self.lost_error(number, "it failed as simulated")
            if push == self._push[number]:
                engine.install(version)

    def _do_version(self, number: int) -> int:
        return self.engines[number].version

    def _do_pause(self, number: int, mode: PauseMode) -> None:
        self.engines[number].pause(mode)

    def _do_resume(self, number: int) -> None:
        self.engines[number].resume()

    def _do_abort(self, number: int, keys: Any) -> None:
        self.engines[number].abort(keys)

    async def _do_sleep(self, number: int, parts: Sequence[str]) -> None:
        if "weights" in parts:
            await asyncio.sleep(self.setup.speed.switch)

    async def _do_wake(self, number: int, parts: Sequence[str]) -> None:
        if "weights" in parts:
            await asyncio.sleep(self.setup.speed.switch)


class TrainerWorkers(Workers):
    """One virtual rank that stands for the whole trainer.

    Attributes:
        busy_seconds: seconds of training so far.
        trained: response tokens trained on.
        over_time: 1 while it trains, over time.
    """

    def __init__(self, setup: Setup, ledger: Ledger, engines: EngineWorkers) -> None:
        super().__init__(["trainer-0"], trains=True)
        self.setup, self.ledger, self.engines = setup, ledger, engines
        self.busy_seconds, self.trained = 0.0, 0
        self._whole = False
        self.over_time = Timeline()

    async def send(self, number: int, method: str, *args: Any) -> Any:
        if method == RankWorker.learn_stored.__name__:
            await self._learn(args[1])
            return (({}, 0), {}), []
        _, name, *rest = args  # RankWorker.at, the step
        return await getattr(self, f"_do_{name}")(*rest), {}

    async def restart(self, number: int) -> None:
        """Nothing to do: the trainer does not fail."""

    async def kill(self, number: int) -> None:
        """Nothing to do."""

    async def _learn(self, share: DataShard) -> None:
        ledger, loop = self.ledger, asyncio.get_running_loop()
        responses = [ledger.response(sample.index) for sample in share.samples]
        prompts = [ledger.lengths.prompt(sample.group_index) for sample in share.samples]
        seconds = self.setup.speed.training([a + b for a, b in zip(responses, prompts, strict=True)])
        self.over_time.add(loop.time(), 1)
        await asyncio.sleep(seconds)
        self.over_time.add(loop.time(), 0)
        self.busy_seconds += seconds
        self.trained += sum(responses)
        for sample in share.samples:
            ledger.forget(sample.index)

    async def _do_collect_digests(self) -> dict[str, Any]:
        return {}  # a virtual trainer writes no file

    async def _do_push(self, version: int, plain: bool, push: int) -> SyncReport:
        seconds = self.setup.speed.sync
        await asyncio.sleep(seconds)
        self.engines.install(push, version)
        return SyncReport(version, 0, 0, seconds)

    async def _do_hold(self, parts: Sequence[str]) -> None:
        if self._whole != (whole := len(parts) > 1):  # the optimizer moves
            self._whole = whole
            await asyncio.sleep(self.setup.speed.switch)

    async def _do_nothing(self, *_: Any) -> None:
        return None

    _do_stage = _do_connect_engines = _do_save = _do_nothing

    async def _do_is_intact(self) -> bool:
        return True


class SimulatedRuntime(Runtime):
    """Virtual engines and a virtual trainer.

    Args:
        run: its options choose sizes and speeds.
        setup: the parsed options.

    Attributes:
        engines, trainer: the workers; set when they are built.
    """

    engines: EngineWorkers
    trainer: TrainerWorkers

    def __init__(self, run: Run, setup: Setup) -> None:
        self.run, self.setup = run, setup
        self.ledger = Ledger(setup.lengths, setup.unit)
        self._failing: asyncio.Task[None] | None = None

    async def build(self, policy: Policy) -> PolicyParts:
        self.engines = EngineWorkers(self.setup, self.ledger, self.run.config.rollout.max_running_requests)
        self.trainer = TrainerWorkers(self.setup, self.ledger, self.engines)
        pool = EnginePool(self.engines, _BUILD_INFO, 1)
        learner = LearnerGroup(self.run, policy, self.trainer, [ALONE], pool)

        async def replace(number: int, lost: WorkerLost) -> None:
            await self.engines.start(number)

        pool.replace_with(replace, learner.resend)
        if self.setup.failure_seconds is not None:
            self._failing = asyncio.create_task(self._fail_engines(self.setup.failure_seconds))
        return PolicyParts(policy, learner, pool, precisions(self.run.config, 0))

    async def close(self) -> None:
        if self._failing is not None:
            self._failing.cancel()
        for number in range(len(self.engines)):
            await self.engines.kill(number)

    async def _fail_engines(self, seconds: float) -> None:
        """Let engines fail at random, each once per ``seconds`` on average."""
        generator = random.Random(self.setup.lengths.seed)
        while True:
            await asyncio.sleep(generator.expovariate(len(self.engines) / seconds))
            await self.engines.fail(generator.randrange(len(self.engines)))
