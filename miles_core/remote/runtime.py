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
from miles_core.errors import ConfigError, WorkerLost
from miles_core.mismatch.same_model import compare_models
from miles_core.plugin.worker import same_plan
from miles_core.precision.quantizer import SideParity
from miles_core.precision.schedule import PLAIN, precisions
from miles_core.remote.engine_front import EngineFront
from miles_core.remote.learner_front import LearnerFront
from miles_core.remote.output import Output
from miles_core.remote.worker import Order
from miles_core.remote.workers import Busy, Restarts, Workers, agreed

log = logging.getLogger(__name__)

#: Seconds a worker has to release what it holds when the run ends.
FAREWELL = 10.0


class RemoteRuntime(Runtime):
    """What every such runtime does; its own part is to ``place`` processes.

    Args:
        run: the driver's; ``--max-restarts`` and ``--worker-timeout`` are core's.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.patience = run, run.config.run.worker_timeout
        self.restarts = Restarts(run.config.run.max_restarts)
        self.order = Order.of(run)
        self.busy = Busy()
        self.output = Output(run.directory)
        self._built: list[tuple[Workers, LearnerFront, PolicyParts]] = []
        self._placed: list[Workers] = []

    @abstractmethod
    async def place(self, policy: Policy) -> tuple[Workers, Workers]:
        """The processes of a policy's ranks, and of its engines: in each a ``RankWorker`` or ``EngineWorker`` is made from
        ``self.order``, not built yet."""

    def names(self, policy: Policy, kind: str, count: int) -> list[str]:
        """What a policy's workers of a kind are called; where there are several policies, with its name."""
        prefix = f"{policy.name}-" if len(self.run.policies) > 1 else ""
        return [f"{prefix}{kind}-{number}" for number in range(count)]

    async def build(self, policy: Policy) -> PolicyParts:
        self.output.follow()
        ranks, engines = await self.place(policy)
        self._placed += [ranks, engines]
        for workers in (ranks, engines):
            await self._accepted(workers, range(len(workers)))
        if self.run.config.run.colocate:  # an engine may take as much memory as it finds when it starts
            worlds, facts = await self._trainer(ranks)
            await ranks.call_all("sleep")
            answers = await engines.call_all("build")
        else:
            answers, (worlds, facts) = await asyncio.gather(engines.call_all("build"), self._trainer(ranks))
        said = agreed("what engines are", dict(zip(engines.names, answers, strict=True)))
        front = EngineFront(engines, said, self.run.config.run.sync_bucket_size)
        if self.run.config.run.colocate:
            await front.sleep(["cache"])
            await ranks.call_all("wake")
        compare_models(self.run, policy, facts, front.model_facts())
        parity = await self._parity(ranks, engines)
        learner = LearnerFront(self.run, ranks, worlds, front)

        async def replace(number: int, lost: WorkerLost) -> None:
            await self._replace_engine(engines, number, lost)

        front.replace_with(replace, learner.resend)
        parts = PolicyParts(policy, learner, front, precisions(self.run.config, 0), parity)
        self._built.append((ranks, learner, parts))
        return parts

    def recovers(self, error: Exception) -> bool:
        return isinstance(error, WorkerLost) and error.trains and self.restarts.used < self.restarts.limit

    async def recover(self, lost: WorkerLost) -> None:
        """Make all ranks of the policy that lost one anew, with the weights they started with."""
        for ranks, learner, parts in self._built:
            if lost.worker in ranks.names:
                if self.run.config.run.colocate:
                    await parts.engine.sleep()
                while True:
                    self.restarts.spend(lost)
                    try:
                        await asyncio.gather(*(ranks.renew(number) for number in range(len(ranks))))
                        await self._accepted(ranks, range(len(ranks)))
                        worlds, _ = await self._trainer(ranks)
                        break
                    except WorkerLost as again:
                        lost = again
                learner.renewed(worlds)
                parts.precisions = precisions(self.run.config, 0)
                return
        raise lost

    def metrics(self) -> dict[str, float]:
        return self.busy.metrics()

    def activity(self) -> Mapping[str, int]:
        return {name: self.busy.open(name) for workers in self._placed for name in workers.names}

    async def close(self) -> None:
        for _, _, parts in self._built:
            await parts.engine.stop()
        for workers in self._placed:
            with suppress(Exception):  # the run has ended; who does not answer now is ended all the same
                async with asyncio.timeout(FAREWELL):
                    await workers.call_all("close")
        for workers in self._placed:
            await workers.end()
        await self.output.close()

    async def _accepted(self, workers: Workers, numbers: Any) -> None:
        """Every worker has accepted the driver's plan."""
        digests = {workers.names[n]: await workers.call(n, "digest") for n in numbers}
        same_plan(self.run.plan.digest, digests)

    async def _trainer(self, ranks: Workers) -> tuple[list[Any], Mapping[str, object]]:
        """Build every rank: where each stands, and what it trains."""
        count = len(ranks)
        if count > 1:
            host = await ranks.host()
            port = await ranks.call(0, "listen", host, count, self.patience)
            await asyncio.gather(*(ranks.call(n, "join", host, port, n, count, self.patience) for n in range(count)))
        built = await ranks.call_all("build")
        worlds = [world for world, _ in built]
        if [(world.rank, world.size) for world in worlds] != [(n, count) for n in range(count)]:
            raise ConfigError(
                f"--trainer {self.run.config.run.trainer} trains in {worlds[0].size} processes where {count} were started: "
                "it does not work in several; give it one"
            )
        return worlds, agreed("the model that is trained", dict(zip(ranks.names, (f for _, f in built), strict=True)))

    async def _parity(self, ranks: Workers, engines: Workers) -> list[SideParity]:
        """How both sides quantise; one engine and one rank stand for all, which run the same code."""
        config = self.run.config
        sides = [(engines, config.rollout.precision), (ranks, config.train.precision)]
        quantised = [(workers, precision) for workers, precision in sides if precision != PLAIN]
        if not quantised:
            return []
        layers = await ranks.call_all("real_layer", quantised[0][1])
        real: Mapping[str, Any] = next((layer for layer in layers if layer), {})
        return [await workers.call(0, "check_parity", precision, real) for workers, precision in quantised]

    async def _replace_engine(self, engines: Workers, number: int, lost: WorkerLost) -> None:
        while True:
            self.restarts.spend(lost)
            try:
                await engines.renew(number)
                await self._accepted(engines, [number])
                await engines.call(number, "build")
                return
            except WorkerLost as again:
                lost = again
