"""``--colocate``: a policy's trainer and engine take turns on the same devices.

The trainer sleeps while the engine generates, the engine while the trainer learns, and for a push both have their weights in
memory and nothing else: the trainer's optimiser and the engine's cache sleep. Whose turn it is follows from what the learner is
asked, so nobody else has to know.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.engine import Engine
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import Learned, LearnerHandle, PolicyParts
from miles_core.contracts.trainer import TrainerPart
from miles_core.contracts.transport import SyncReport
from miles_core.data.sample import Sample
from miles_core.precision.schedule import Precisions

WEIGHTS: tuple[TrainerPart, ...] = ("weights",)
ALL: tuple[TrainerPart, ...] = ("weights", "optimizer")


class Colocated(LearnerHandle):
    """A learner whose every call makes room for itself on devices that it shares with the engine.

    What ``learn``, ``supervise`` and ``load`` change has to be pushed before the engine generates again, so they put the engine's
    weights to sleep too. Anything else that is asked in the engine's turn leaves it its weights.

    Args:
        run: whose clock times the moves.
        learner: the one that is asked.
        engine: of the same policy.
    """

    def __init__(self, run: Run, learner: LearnerHandle, engine: Engine) -> None:
        self.run, self.handle, self.engine = run, learner, engine
        self._generates = False  # whose turn it is; both were built, and nothing was pushed yet

    async def learn(self, samples: Sequence[Sample], step: int) -> Learned:
        await self._trains()
        return await self.handle.learn(samples, step)

    async def supervise(self, samples: Sequence[Sample], lr: float) -> dict[str, float]:
        await self._trains()
        return await self.handle.supervise(samples, lr)

    async def load(self, directory: Path) -> None:
        await self._trains()
        await self.handle.load(directory)

    async def push(self, version: int, plain: bool = False) -> SyncReport:
        with self.run.clock.phase("colocate"):
            await self.engine.sleep(["cache"])
            await self.handle.sleep(["optimizer"])
            await self.handle.wake(WEIGHTS)
            await self.engine.wake(["weights"])
        report = await self.handle.push(version, plain)
        with self.run.clock.phase("colocate"):
            await self.handle.sleep(WEIGHTS)
            await self.engine.wake(["cache"])
        self._generates = True
        return report

    async def stage(self, version: int | None) -> None:
        """Nothing: the engine does not generate while there is something to stage."""

    async def intact(self) -> bool:
        return await self.handle.intact()

    async def reset_optimizer(self) -> None:
        async with self._awake(ALL):
            await self.handle.reset_optimizer()

    async def log_probs(self, samples: Sequence[Sample], emulation: Emulation = AS_TRAINED) -> list[np.ndarray]:
        async with self._awake(WEIGHTS):
            return await self.handle.log_probs(samples, emulation)

    async def take_snapshot(self, version: int) -> None:
        async with self._awake(WEIGHTS):
            await self.handle.take_snapshot(version)
        self.snapshot_version = version

    async def rebuild(self, precisions: Precisions) -> None:
        async with self._awake(WEIGHTS):
            await self.handle.rebuild(precisions)

    async def save(self, directory: Path) -> None:
        async with self._awake(ALL):
            await self.handle.save(directory)

    async def export(self, directory: Path) -> None:
        async with self._awake(WEIGHTS):
            await self.handle.export(directory)

    async def _trains(self) -> None:
        """It is the trainer's turn until the next push."""
        self._generates = False
        with self.run.clock.phase("colocate"):
            await self.engine.sleep()
            await self.handle.wake(ALL)

    @asynccontextmanager
    async def _awake(self, parts: Sequence[TrainerPart]) -> AsyncIterator[None]:
        """These of the trainer's parts are awake inside. In the engine's turn it lends the memory of its cache: what it
        generates is returned unfinished, and whoever asked goes on from there."""
        if not self._generates:
            await self.handle.wake(parts)
            yield
            return
        await self.engine.pause("abort")
        await self.engine.sleep(["cache"])
        await self.handle.wake(parts)
        yield
        await self.handle.sleep(parts)
        await self.engine.wake(["cache"])
        await self.engine.resume()


def colocated(run: Run, parts: PolicyParts) -> PolicyParts:
    """``parts``, of which learner and engine take turns with ``--colocate``."""
    if run.config.run.colocate:
        parts.learner = Colocated(run, parts.learner, parts.engine)
    return parts
