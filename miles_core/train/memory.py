"""Device memory of a policy's trainer and engine: on separate devices, or shared by both (``--colocate``).

With ``--colocate`` the trainer releases its memory while the engine generates, and the engine while the trainer learns. During a push both
keep only their weights in memory: neither the trainer's optimizer state nor the engine's cache. The methods of a ``LearnerHandle`` switch
the devices between them, so no other part has to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from miles_core.contracts.engine import Engine
from miles_core.contracts.run import Run
from miles_core.contracts.trainer import ALL_PARTS, TrainerPart

#: Makes the trainer keep exactly these parts in device memory.
Hold = Callable[[Sequence[TrainerPart]], Awaitable[object]]


class SeparateMemory:
    """Trainer and engine have separate devices, so no memory has to be moved."""

    #: whether trainer and engine share devices
    colocated = False

    @asynccontextmanager
    async def train(self) -> AsyncIterator[None]:
        """Context for calls that change the weights. A push must follow before the engine generates again."""
        yield

    @asynccontextmanager
    async def read(self, parts: Sequence[TrainerPart]) -> AsyncIterator[None]:
        """Context for calls that read these parts of the trainer and change no weights."""
        yield

    @asynccontextmanager
    async def push(self) -> AsyncIterator[None]:
        """Context for a push of the weights."""
        yield


class ColocatedMemory(SeparateMemory):
    """Trainer and engine share devices.

    Args:
        run: its clock measures the moves.
        hold: moves the trainer's parts.
        engine: the engine of the same policy.
    """

    colocated = True

    def __init__(self, run: Run, hold: Hold, engine: Engine) -> None:
        self.run, self.hold, self.engine = run, hold, engine
        self._generates = False  # nothing was pushed yet

    @asynccontextmanager
    async def train(self) -> AsyncIterator[None]:
        self._generates = False
        with self.run.clock.phase("colocate"):
            await self.engine.sleep()
            await self.hold(ALL_PARTS)
        yield

    @asynccontextmanager
    async def read(self, parts: Sequence[TrainerPart]) -> AsyncIterator[None]:
        """While the engine generates, it releases the memory of its cache: requests in flight are aborted, and their callers continue them
        later."""
        if not self._generates:
            await self.hold(ALL_PARTS)
            yield
            return
        await self.engine.pause("abort")
        await self.engine.sleep(["cache"])
        await self.hold(parts)
        yield
        await self.hold(())
        await self.engine.wake(["cache"])
        await self.engine.resume()

    @asynccontextmanager
    async def push(self) -> AsyncIterator[None]:
        with self.run.clock.phase("colocate"):
            await self.engine.sleep(["cache"])
            await self.hold(("weights",))
            await self.engine.wake(["weights"])
        yield
        with self.run.clock.phase("colocate"):
            await self.hold(())
            await self.engine.wake(["cache"])
        self._generates = True


def memory_of(run: Run, hold: Hold, engine: Engine | None) -> SeparateMemory:
    """Return the memory of a policy's trainer and engine; ``hold`` and ``engine`` as for ``ColocatedMemory``."""
    return ColocatedMemory(run, hold, engine) if engine is not None and run.config.run.colocate else SeparateMemory()
