"""``--colocate``: a policy's trainer and engine take turns on the same devices.

The trainer gives its memory back while the engine generates, and the engine while the trainer learns. For a push both have their
weights in memory and nothing else: neither the trainer's optimizer nor the engine's cache. Whose turn it is follows from what the
learner is asked, so no other part has to know.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from miles_core.contracts.engine import Engine
from miles_core.contracts.run import Run
from miles_core.contracts.trainer import ALL_PARTS, TrainerPart

#: Has the trainer hold these parts in device memory, and no others.
Hold = Callable[[Sequence[TrainerPart]], Awaitable[object]]


class Turns:
    """Trainer and engine have devices of their own, so nothing has to move."""

    #: whether they take turns
    taken = False

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Around what changes the weights; they have to be pushed before the engine generates again."""
        yield

    @asynccontextmanager
    async def holding(self, parts: Sequence[TrainerPart]) -> AsyncIterator[None]:
        """Around what needs these parts of the trainer and changes none."""
        yield

    @asynccontextmanager
    async def pushing(self) -> AsyncIterator[None]:
        """Around a push of the weights."""
        yield


class TakingTurns(Turns):
    """Trainer and engine share devices.

    Args:
        run: its clock times the moves.
        hold: moves the trainer's parts.
        engine: of the same policy.
    """

    taken = True

    def __init__(self, run: Run, hold: Hold, engine: Engine) -> None:
        self.run, self.hold, self.engine = run, hold, engine
        self._generates = False  # both were built, and nothing was pushed yet

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        self._generates = False
        with self.run.clock.phase("colocate"):
            await self.engine.sleep()
            await self.hold(ALL_PARTS)
        yield

    @asynccontextmanager
    async def holding(self, parts: Sequence[TrainerPart]) -> AsyncIterator[None]:
        """In the engine's turn the engine lends the memory of its cache: requests in flight return unfinished, and whoever
        asked continues them."""
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
    async def pushing(self) -> AsyncIterator[None]:
        with self.run.clock.phase("colocate"):
            await self.engine.sleep(["cache"])
            await self.hold(("weights",))
            await self.engine.wake(["weights"])
        yield
        with self.run.clock.phase("colocate"):
            await self.hold(())
            await self.engine.wake(["cache"])
        self._generates = True
