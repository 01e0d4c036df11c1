"""A policy's trainer, seen from the driver: all of its ranks, each in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import Learned, LearnerHandle
from miles_core.contracts.trainer import TrainerPart
from miles_core.contracts.transport import SyncReport
from miles_core.data.sample import Sample
from miles_core.data.world import World, shares
from miles_core.errors import MilesError, SyncError, WorkerLost
from miles_core.precision.schedule import Precisions
from miles_core.remote.engine_front import EngineFront
from miles_core.remote.workers import Workers, gathered
from miles_core.run.rank import combined, divided, in_order

#: Seconds in which the death of a rank becomes known after its peers failed; that of a whole machine takes a cluster half a minute.
GRACE = 60.0


class LearnerFront(LearnerHandle):
    """Sends each call to all ranks, samples to the ranks of the replica that they are divided to.

    Args:
        run: the driver's.
        ranks: where they are; each holds a ``RankWorker``.
        worlds: where each rank stands.
        engines: the front that the driver asks; lost engines are replaced from now on.
    """

    def __init__(self, run: Run, ranks: Workers, worlds: Sequence[World], engines: EngineFront) -> None:
        self.run, self.ranks, self.engines = run, ranks, engines
        self.worlds = tuple(worlds)
        self._turn = asyncio.Lock()  # ranks take one call at a time
        self._holds: int | None = None  # the step whose weights were trained and not pushed yet
        self._connected: int | None = None
        self._intact = True

    @property
    def replicas(self) -> int:
        """Copies of the model among which samples are divided."""
        return self.worlds[0].replicas

    async def learn(self, samples: Sequence[Sample], step: int) -> Learned:
        divided_to = divided(samples, self.run.config.train, self.replicas)
        sent = [self.ranks.share(share) for share in divided_to]
        self._intact = False
        answers = await self._each("learn", lambda world: (sent[world.replica], step))
        self._intact, self._holds = True, step + 1
        clocks = [seconds for _, seconds, _ in answers]
        self.run.clock.waited({name: max(c.get(name, 0.0) for c in clocks) for name in clocks[0]})
        tokens = [self._first([seen for _, _, seen in answers], replica) for replica in range(self.replicas)]
        metrics = combined([pairs for pairs, _, _ in self._one_each(answers)])
        return Learned(metrics, divided_to[0].count, in_order(divided_to, tokens))

    async def intact(self) -> bool:
        """Whether every rank has the weights of a completed ``learn``."""
        return self._intact

    async def supervise(self, samples: Sequence[Sample], lr: float) -> dict[str, float]:
        answers = await self._each("supervise", lambda world: (list(samples[world.replica :: self.replicas]), lr))
        return combined(self._one_each(answers))

    async def reset_optimizer(self) -> None:
        await self._each("reset_optimizer")

    async def log_probs(self, samples: Sequence[Sample], emulation: Emulation = AS_TRAINED) -> list[np.ndarray]:
        if emulation.held is not None or emulation.through is not None:
            raise MilesError("the engine runs in another process, where the trainer cannot see its modules")
        mine = shares(samples, [0] * len(samples), self.replicas)
        answers = await self._each("log_probs", lambda world: ([samples[i] for i in mine[world.replica]], emulation))
        found = dict(
            pair for at, rows in zip(mine, self._one_each(answers), strict=True) for pair in zip(at, rows, strict=True)
        )
        return [found[i] for i in range(len(samples))]

    async def take_snapshot(self, version: int) -> None:
        await self._each("take_snapshot", lambda _: (version,))
        self.snapshot_version = version

    async def rebuild(self, precisions: Precisions) -> None:
        await self._each("rebuild", lambda _: (precisions,))

    async def push(self, version: int, plain: bool = False) -> SyncReport:
        """Every engine gets the weights; where one is lost meanwhile, all of them again once it is replaced."""
        while True:
            await self.engines.whole()
            try:
                return await self._pushed(version, plain)
            except WorkerLost as lost:
                self.engines.lost(lost)

    async def stage(self, version: int | None) -> None:
        try:
            await self.engines.whole()
            await self._connect()
            await self._each("stage", lambda _: (version,))
        except WorkerLost as lost:
            self.engines.lost(lost)
            raise SyncError(str(lost)) from lost

    async def sleep(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        await self._each("sleep", lambda _: (parts,))

    async def wake(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        await self._each("wake", lambda _: (parts,))

    async def save(self, directory: Path) -> None:
        await self._each("save", lambda _: (directory.absolute(),))

    async def load(self, directory: Path) -> None:
        await self._each("load", lambda _: (directory.absolute(),))
        self._holds = None

    async def export(self, directory: Path) -> None:
        await self._each("export", lambda _: (directory.absolute(),))

    async def resend(self) -> None:
        """Give the engines the weights as they are now, without a step of the loop."""
        await self._pushed(self.run.step if self._holds is None else self._holds)

    def renewed(self, worlds: Sequence[World]) -> None:
        """The ranks were made anew and know nothing of what was before."""
        self.worlds, self._connected, self._holds, self._intact = tuple(worlds), None, None, True
        self._turn = asyncio.Lock()

    async def _pushed(self, version: int, plain: bool = False) -> SyncReport:
        await self._connect()
        reports: list[SyncReport] = await self._each("push", lambda _: (version, plain))
        await self.engines.served(version)
        self._holds = None
        return SyncReport(
            version,
            sum(r.nbytes for r in reports),
            sum(r.tensors for r in reports),
            max(r.seconds for r in reports),
            max(reports, key=lambda r: r.nbytes).metrics,
        )

    async def _connect(self) -> None:
        """Tell the ranks which engines there are, where they do not know."""
        if self._connected != self.engines.renewed:
            self._connected = self.engines.renewed
            await self._each("connect", lambda _: (self.engines.engines, self.engines.said))

    async def _each(self, method: str, args: Callable[[World], tuple[Any, ...]] = lambda world: ()) -> list[Any]:
        """What every rank answers."""
        async with self._turn:
            calls = [
                asyncio.ensure_future(self.ranks.call(number, "at", self.run.step, method, *args(world), named=method))
                for number, world in enumerate(self.worlds)
            ]
            try:
                return await gathered(calls)
            except WorkerLost as lost:
                self._intact = self._intact and not lost.trains
                if not lost.trains:  # an engine: the other ranks must not wait for it
                    await self.engines.give_up()
                    await asyncio.wait(calls)
                raise
            except Exception:
                # what a rank says whose peer died may arrive before the news of that death
                await asyncio.wait(calls, timeout=GRACE)
                for call in calls:
                    if call.done() and isinstance(error := call.exception(), WorkerLost):
                        self._intact = False
                        raise error from None
                raise

    def _first(self, answers: Sequence[Any], replica: int) -> Any:
        """The first answer of a rank of this replica that says something."""
        found = [answer for world, answer in zip(self.worlds, answers, strict=True) if world.replica == replica]
        return next(filter(None, found), [])

    def _one_each(self, answers: Sequence[Any]) -> list[Any]:
        """The answer of one rank of each replica."""
        return list({world.replica: answer for world, answer in zip(self.worlds, answers, strict=True)}.values())
