"""Base of runtimes whose trainer ranks and engines are processes: builds them in order and recovers lost ones."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.contracts.run import Policy, Run
from miles_core.contracts.runtime import PolicyParts, Producer, Runtime
from miles_core.contracts.trainer import ALL_PARTS
from miles_core.errors import ConfigError, WorkerLost
from miles_core.mismatch.first_steps import make_check
from miles_core.mismatch.same_model import compare_models
from miles_core.precision.quantizer import SideParity
from miles_core.precision.schedule import PLAIN, precisions
from miles_core.train.rank import Rank
from miles_workers.busy_time import BusyTime
from miles_workers.engine_pool import EnginePool
from miles_workers.engine_worker import EngineWorker
from miles_workers.learner_group import LearnerGroup
from miles_workers.local_workers import rollout_processes
from miles_workers.output import Output
from miles_workers.rank_worker import RankWorker
from miles_workers.restarts import Restarts
from miles_workers.rollout_pool import RolloutPool
from miles_workers.timeouts import Timeouts
from miles_workers.worker import Worker, WorkerSpec
from miles_workers.workers import Workers, await_all, close_workers, require_agreement

log = logging.getLogger(__name__)

#: Fraction of ``--stop-within`` in which a rank must give a heartbeat after the current step was aborted. The run does not wait for others.
LAST_BEAT = 0.15


class RemoteRuntime(Runtime):
    """Builds, checks and replaces workers; a subclass implements ``place`` to start processes.

    Args:
        run: the driver's run; core's options define ``--max-restarts`` and the worker timeouts.
    """

    def __init__(self, run: Run) -> None:
        options = run.config.run
        self.run = run
        self.timeouts = Timeouts(options.worker_timeout, options.worker_build_timeout, options.worker_heartbeat)
        self.restarts = Restarts(run.config.run.max_restarts)
        self.spec = WorkerSpec.of(run)
        self.busy = BusyTime(run.clock.record)
        self.output = Output(run.directory)
        self._built: list[tuple[Workers, LearnerGroup, EnginePool | None, PolicyParts]] = []
        self._placed: list[Workers] = []
        self._rollouts: Workers | None = None

    @abstractmethod
    async def place(self, policy: Policy) -> tuple[Workers, Workers]:
        """Return handles to the processes of a policy's ranks and engines (no engines if ``Policy.generates`` is False). Each process
        creates a ``RankWorker`` or ``EngineWorker`` from ``self.spec`` without building it."""

    def place_rollouts(self, names: Sequence[str]) -> Workers:
        """Return the handle to processes of rollout workers, which are not started: on this machine, unless overridden."""
        return rollout_processes(self.run, names, self.timeouts, self.busy)

    def producer(self, local: Producer, parts: Sequence[PolicyParts]) -> Producer:
        count = self.run.config.rollout.workers
        if count is None:
            return local
        if self._rollouts is None:
            self._rollouts = self.place_rollouts([f"rollout-{number}" for number in range(count)])
            self._rollouts.peers = self._placed
            self._placed.append(self._rollouts)
        return RolloutPool(self.run, self._rollouts, parts, self.restarts)

    def names(self, policy: Policy, kind: str, count: int) -> list[str]:
        """Return the names of a policy's workers of one kind; with several policies they include the policy's name."""
        prefix = f"{policy.name}-" if len(self.run.policies) > 1 else ""
        return [f"{prefix}{kind}-{number}" for number in range(count)]

    async def start(self, workers: Workers) -> Workers:
        """Start all processes of one kind, restarting those that die during the start. For use in ``place``."""
        workers.peers = self._placed
        self._placed.append(workers)
        await self._start_all(workers)
        return workers

    async def build(self, policy: Policy) -> PolicyParts:
        self.output.follow()
        ranks, engines = await self.place(policy)
        while True:
            try:
                return await self._assemble(policy, ranks, engines)
            except WorkerLost as lost:  # lost between two parts; parts already built are created again with the others
                self.restarts.spend(lost)
                await await_all((self._start_all(ranks), self._start_all(engines)))

    async def _assemble(self, policy: Policy, ranks: Workers, engines: Workers) -> PolicyParts:
        """Build the parts in a policy's processes, and its two handles."""
        if not len(engines):
            worlds, _ = await self._trainer(ranks)
            alone = LearnerGroup(self.run, policy, ranks, worlds)
            parts = PolicyParts(policy, alone, None, precisions(self.run.config_of(policy), 0))
            self._built.append((ranks, alone, None, parts))
            return parts
        if self.run.config.run.colocate:  # an engine may allocate all memory that is free when it starts
            worlds, facts = await self._trainer(ranks)
            await ranks.call_all(Rank.hold, ())
            answers = await self._engines(engines)
        else:
            answers, (worlds, facts) = await await_all((self._engines(engines), self._trainer(ranks)))
        build_info = require_agreement("the description of the engines", dict(zip(engines.names, answers, strict=True)))
        pool = EnginePool(engines, build_info, self.run.config.run.sync_bucket_size)
        if self.run.config.run.colocate:
            await pool.sleep(["cache"])
            await ranks.call_all(Rank.hold, ALL_PARTS)
        compare_models(self.run, policy, facts, pool.model_facts())
        parity = await self._measure_parity(policy, ranks, engines)
        learner = LearnerGroup(self.run, policy, ranks, worlds, pool)

        async def replace(number: int, lost: WorkerLost) -> None:
            await self._replace_engine(engines, number, lost)

        pool.replace_with(replace, learner.resend)
        parts = PolicyParts(policy, learner, pool, precisions(self.run.config_of(policy), 0), parity)
        learner.check = make_check(self.run, parts)
        self._built.append((ranks, learner, pool, parts))
        return parts

    def recovers(self, lost: WorkerLost) -> bool:
        return lost.trains and self.restarts.left and not self.run.stop_requested

    async def recover(self, lost: WorkerLost) -> None:
        """Recreate all ranks of the policy that lost a rank, with their initial weights. Engines discard the lost ranks' buckets."""
        for ranks, learner, pool, parts in self._built:
            if lost.worker in ranks.names:
                learner.lost = lost
                if pool is not None:
                    await pool.begin_push()
                    if self.run.config.run.colocate:
                        await pool.sleep()
                self.restarts.spend(lost)
                await self._start_all(ranks)
                worlds, _ = await self._trainer(ranks)
                learner.reset_ranks(worlds)
                parts.precisions = precisions(self.run.config_of(parts.policy), 0)
                return
        raise lost

    async def release(self) -> None:
        """End all engines, because ranks may be waiting for them, and ranks that hang, which could not save anything."""
        await asyncio.gather(*(pool.abandon() for _, _, pool, _ in self._built if pool is not None))
        seconds = self.run.config.run.stop_within * LAST_BEAT
        beats = [ranks.await_beat(number, seconds) for ranks, _, _, _ in self._built for number in range(len(ranks))]
        await asyncio.gather(*beats, return_exceptions=True)

    def metrics(self) -> dict[str, float]:
        return self.busy.metrics()

    def activity(self) -> Mapping[str, int]:
        return {name: self.busy.open(name) for workers in self._placed for name in workers.names}

    async def close(self) -> None:
        for _, _, pool, _ in self._built:
            if pool is not None:
                await pool.stop()
        for workers in self._placed:
            workers.unwatch()
        await close_workers(self._placed, self.run.stop_requested)
        await self.output.close()

    async def _start(self, workers: Workers, number: int) -> None:
        """Start one process and let it validate the driver's plan; retry if it dies."""
        while True:
            try:
                await workers.start(number)
                await workers.call(number, Worker.confirm_plan)
                return
            except WorkerLost as lost:
                self.restarts.spend(lost)

    async def _start_all(self, workers: Workers) -> None:
        await await_all(self._start(workers, number) for number in range(len(workers)))

    async def _engines(self, engines: Workers) -> list[Any]:
        """Build all engines; return their results of ``EngineWorker.build``."""
        return await await_all(self._engine(engines, number) for number in range(len(engines)))

    async def _engine(self, engines: Workers, number: int) -> Any:
        """Build an engine; if its process dies, retry in a new one."""
        while True:
            try:
                return await engines.call(number, EngineWorker.build)
            except WorkerLost as lost:
                self.restarts.spend(lost)
            await self._start(engines, number)

    async def _replace_engine(self, engines: Workers, number: int, lost: WorkerLost) -> None:
        self.restarts.spend(lost)
        await self._start(engines, number)
        await self._engine(engines, number)

    async def _trainer(self, ranks: Workers) -> tuple[list[Any], Mapping[str, object]]:
        """Build all ranks; return their positions and the facts of the trained model. If a rank dies, recreate all of them."""
        while True:
            try:
                return await self._join(ranks)
            except WorkerLost as lost:
                if lost.worker not in ranks.names:
                    raise
                self.restarts.spend(lost)
            await self._start_all(ranks)

    async def _join(self, ranks: Workers) -> tuple[list[Any], Mapping[str, object]]:
        count = len(ranks)
        if count > 1:
            host, limit = await ranks.host(), self.run.config.run.worker_timeout
            port = await ranks.call(0, RankWorker.listen, host, count, limit)
            await await_all(ranks.call(n, RankWorker.join, host, port, n, count, limit) for n in range(count))
        built = await await_all(ranks.call(n, RankWorker.build) for n in range(count))
        worlds = [world for world, _ in built]
        if [(world.rank, world.size) for world in worlds] != [(n, count) for n in range(count)]:
            raise ConfigError(
                f"--trainer {self.run.config.run.trainer} trains in {worlds[0].size} processes, but {count} were started: "
                "it does not support several processes; configure one"
            )
        return worlds, require_agreement(
            "the model that is trained", dict(zip(ranks.names, (f for _, f in built), strict=True))
        )

    async def _measure_parity(self, policy: Policy, ranks: Workers, engines: Workers) -> list[SideParity]:
        """Measure the quantisers of both sides on one engine and one rank; all others run the same code."""
        config = self.run.config_of(policy)
        quantised = [each for each in (config.rollout.precision, config.train.precision) if each != PLAIN]
        if not quantised:
            return []
        layers = await ranks.call_all(RankWorker.real_layer, quantised[0])
        real: Mapping[str, Any] = next((layer for layer in layers if layer), {})
        found = []
        if config.rollout.precision != PLAIN:
            found.append(await engines.call(0, EngineWorker.check_parity, config.rollout.precision, real))
        if config.train.precision != PLAIN:
            found.append(await ranks.call(0, RankWorker.check_parity, config.train.precision, real))
        return found
