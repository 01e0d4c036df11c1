"""A runtime whose trainer ranks and engines are processes: the order in which they are made, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from miles_core.contracts.policy import Policy
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts, Runtime
from miles_core.contracts.trainer import ALL_PARTS
from miles_core.errors import ConfigError, WorkerLost
from miles_core.plugin.worker import same_plan
from miles_core.precision.quantizer import SideParity
from miles_core.precision.schedule import PLAIN, precisions
from miles_mismatch.same_model import compare_models
from miles_runtime.engine_front import EngineFront
from miles_runtime.learner_front import LearnerFront
from miles_runtime.output import Output
from miles_runtime.patience import Patience
from miles_runtime.worker import Order
from miles_runtime.workers import Busy, Restarts, Workers, agreed, together

log = logging.getLogger(__name__)

#: Seconds that workers have to release what they hold when the run ends, and when it was asked to stop.
FAREWELL, FAREWELL_STOPPED = 10.0, 2.0


class RemoteRuntime(Runtime):
    """What every such runtime does; its own part is to ``place`` processes.

    Args:
        run: the driver's; ``--max-restarts`` and the limits on waiting for workers are core's.
    """

    def __init__(self, run: Run) -> None:
        options = run.config.run
        self.run = run
        self.patience = Patience(options.worker_timeout, options.worker_build_timeout, options.worker_heartbeat)
        self.restarts = Restarts(run.config.run.max_restarts)
        self.order = Order.of(run)
        self.busy = Busy()
        self.output = Output(run.directory)
        self._built: list[tuple[Workers, LearnerFront, EngineFront | None, PolicyParts]] = []
        self._placed: list[Workers] = []

    @abstractmethod
    async def place(self, policy: Policy) -> tuple[Workers, Workers]:
        """The processes of a policy's ranks, and of its engines (none where ``Policy.generates`` is False): in each a ``RankWorker`` or
        ``EngineWorker`` is made from ``self.order``, not built yet."""

    def names(self, policy: Policy, kind: str, count: int) -> list[str]:
        """What a policy's workers of a kind are called; where there are several policies, with its name."""
        prefix = f"{policy.name}-" if len(self.run.policies) > 1 else ""
        return [f"{prefix}{kind}-{number}" for number in range(count)]

    async def start(self, workers: Workers) -> Workers:
        """Start all processes of one kind; one that dies meanwhile is made again. For ``place``."""
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
            except WorkerLost as lost:  # between the parts; those that were built are made again with the others
                self.restarts.spend(lost)
                await together((self._start_all(ranks), self._start_all(engines)))

    async def _assemble(self, policy: Policy, ranks: Workers, engines: Workers) -> PolicyParts:
        """Build what the processes of a policy hold, and the two fronts."""
        if not len(engines):
            worlds, _ = await self._trainer(ranks)
            alone = LearnerFront(self.run, policy, ranks, worlds)
            parts = PolicyParts(policy, alone, None, precisions(self.run.config_of(policy), 0))
            self._built.append((ranks, alone, None, parts))
            return parts
        if self.run.config.run.colocate:  # an engine may take as much memory as it finds when it starts
            worlds, facts = await self._trainer(ranks)
            await ranks.call_all("hold", ())
            answers = await self._engines(engines)
        else:
            answers, (worlds, facts) = await together((self._engines(engines), self._trainer(ranks)))
        said = agreed("what engines are", dict(zip(engines.names, answers, strict=True)))
        front = EngineFront(engines, said, self.run.config.run.sync_bucket_size)
        if self.run.config.run.colocate:
            await front.sleep(["cache"])
            await ranks.call_all("hold", ALL_PARTS)
        compare_models(self.run, policy, facts, front.model_facts())
        parity = await self._parity(policy, ranks, engines)
        learner = LearnerFront(self.run, policy, ranks, worlds, front)

        async def replace(number: int, lost: WorkerLost) -> None:
            await self._replace_engine(engines, number, lost)

        front.replace_with(replace, learner.resend)
        parts = PolicyParts(policy, learner, front, precisions(self.run.config_of(policy), 0), parity)
        self._built.append((ranks, learner, front, parts))
        return parts

    def recovers(self, error: Exception) -> bool:
        allowed = self.restarts.left and not self.run.stop_requested
        return isinstance(error, WorkerLost) and error.trains and allowed

    async def recover(self, lost: WorkerLost) -> None:
        """Make all ranks of the policy that lost one again, with the weights they started with. Engines forget what the lost ones sent."""
        for ranks, learner, front, parts in self._built:
            if lost.worker in ranks.names:
                if front is not None:
                    await front.begin_push()
                    if self.run.config.run.colocate:
                        await front.sleep()
                self.restarts.spend(lost)
                await self._start_all(ranks)
                worlds, _ = await self._trainer(ranks)
                learner.renewed(worlds)
                parts.precisions = precisions(self.run.config_of(parts.policy), 0)
                return
        raise lost

    async def release(self) -> None:
        """End all engines, for which the ranks may be waiting."""
        for _, _, front, _ in self._built:
            if front is not None:
                await front.abandon()

    def metrics(self) -> dict[str, float]:
        return self.busy.metrics()

    def activity(self) -> Mapping[str, int]:
        return {name: self.busy.open(name) for workers in self._placed for name in workers.names}

    async def close(self) -> None:
        for _, _, front, _ in self._built:
            if front is not None:
                await front.stop()
        for workers in self._placed:
            workers.unwatch()
        goodbyes = [
            asyncio.ensure_future(workers.call(number, "close"))
            for workers in self._placed
            for number in range(len(workers))
        ]
        if goodbyes:  # who does not answer now is ended all the same
            seconds = FAREWELL_STOPPED if self.run.stop_requested else FAREWELL
            _, late = await asyncio.wait(goodbyes, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*goodbyes, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await asyncio.gather(*(workers.end() for workers in self._placed))
        await self.output.close()

    async def _start(self, workers: Workers, number: int) -> None:
        """Make one process and have it accept the driver's plan; again where it dies meanwhile."""
        while True:
            try:
                await workers.start(number)
                same_plan(self.run.plan.digest, {workers.names[number]: await workers.call(number, "digest")})
                return
            except WorkerLost as lost:
                self.restarts.spend(lost)

    async def _start_all(self, workers: Workers) -> None:
        await together(self._start(workers, number) for number in range(len(workers)))

    async def _engines(self, engines: Workers) -> list[Any]:
        """Build every engine: what each answered."""
        return await together(self._engine(engines, number) for number in range(len(engines)))

    async def _engine(self, engines: Workers, number: int) -> Any:
        """Build an engine; where its process dies meanwhile, in another one."""
        while True:
            try:
                return await engines.call(number, "build")
            except WorkerLost as lost:
                self.restarts.spend(lost)
            await self._start(engines, number)

    async def _replace_engine(self, engines: Workers, number: int, lost: WorkerLost) -> None:
        self.restarts.spend(lost)
        await self._start(engines, number)
        await self._engine(engines, number)

    async def _trainer(self, ranks: Workers) -> tuple[list[Any], Mapping[str, object]]:
        """Build every rank: where each stands, and what it trains. Where one dies meanwhile, all are made again."""
        while True:
            try:
                return await self._joined(ranks)
            except WorkerLost as lost:
                if lost.worker not in ranks.names:
                    raise
                self.restarts.spend(lost)
            await self._start_all(ranks)

    async def _joined(self, ranks: Workers) -> tuple[list[Any], Mapping[str, object]]:
        count = len(ranks)
        if count > 1:
            host, limit = await ranks.host(), self.patience.call
            port = await ranks.call(0, "listen", host, count, limit)
            await together(ranks.call(n, "join", host, port, n, count, limit) for n in range(count))
        built = await together(ranks.call(n, "build") for n in range(count))
        worlds = [world for world, _ in built]
        if [(world.rank, world.size) for world in worlds] != [(n, count) for n in range(count)]:
            raise ConfigError(
                f"--trainer {self.run.config.run.trainer} trains in {worlds[0].size} processes where {count} were started: "
                "it does not work in several; give it one"
            )
        return worlds, agreed("the model that is trained", dict(zip(ranks.names, (f for _, f in built), strict=True)))

    async def _parity(self, policy: Policy, ranks: Workers, engines: Workers) -> list[SideParity]:
        """How both sides quantise; one engine and one rank stand for all, which run the same code."""
        config = self.run.config_of(policy)
        sides = [(engines, config.rollout.precision), (ranks, config.train.precision)]
        quantised = [(workers, precision) for workers, precision in sides if precision != PLAIN]
        if not quantised:
            return []
        layers = await ranks.call_all("real_layer", quantised[0][1])
        real: Mapping[str, Any] = next((layer for layer in layers if layer), {})
        return [await workers.call(0, "check_parity", precision, real) for workers, precision in quantised]
