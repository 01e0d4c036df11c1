"""A policy's trainer as the driver sees it: all ranks of it, in processes of their own or one in the driver's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numpy as np

from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.engine import Engine
from miles_core.contracts.policy import Policy
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import Learned, LearnerHandle, TopLogProbs
from miles_core.contracts.trainer import ALL_PARTS, TrainerPart
from miles_core.contracts.transport import SyncReport
from miles_core.data.sample import Sample
from miles_core.data.world import World, shares
from miles_core.errors import ConfigError, MilesError, SyncError, WorkerLost
from miles_core.precision.schedule import Precisions
from miles_core.train.share import combined, divided, in_order
from miles_runtime.engine_front import EngineFront
from miles_runtime.rank import Rank
from miles_runtime.turns import TakingTurns, Turns
from miles_runtime.workers import GRACE, Workers, gathered

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """A method of a rank, and its arguments."""

    method: str
    args: tuple[Any, ...]


class _Recorder:
    """Stands for a ``Rank``: a method of it that is called returns the ``Call`` to send to one. Type checkers see a rank."""

    def __getattr__(self, name: str) -> Callable[..., Call]:
        return lambda *args: Call(name, args)


_RANK = cast(Rank, _Recorder())


class LearnerFront(LearnerHandle):
    """Sends each call to all ranks, and samples to the ranks of the replica that they are divided to.

    Args:
        run: the driver's.
        policy: whose trainer it is.
        ranks: where they are; each holds a ``Rank``.
        worlds: where each rank stands.
        engine: where the weights go: an ``EngineFront``, whose lost engines are replaced from now on, or an engine in this process, to
            which the rank is connected already; None for a policy that does not generate.
    """

    def __init__(
        self, run: Run, policy: Policy, ranks: Workers, worlds: Sequence[World], engine: Engine | None = None
    ) -> None:
        self.run, self.policy, self.ranks = run, policy, ranks
        self.engines = engine if isinstance(engine, EngineFront) else None
        self.worlds = tuple(worlds)
        colocated = engine is not None and run.config.run.colocate
        self.turns = TakingTurns(run, self.hold, engine) if colocated and engine is not None else Turns()
        self._turn = asyncio.Lock()  # ranks take one call at a time
        self._holds: int | None = None  # the step whose weights were trained and not pushed yet
        self._connected: int | None = None
        self._lost = False

    @property
    def replicas(self) -> int:
        """Copies of the model among which samples are divided."""
        return self.worlds[0].replicas

    async def learn(self, samples: Sequence[Sample], step: int) -> Learned:
        if not self.policy.learns:
            raise ConfigError(
                f"the policy {self.policy.name} is frozen and cannot learn; give it the role train or critic"
            )
        divided_to = divided(samples, self.run.config_of(self.policy).train, self.replicas)
        sent = [self.ranks.share(share) for share in divided_to]
        async with self.turns.training():
            answers = await self._each(lambda rank, world: rank.learn(sent[world.replica], step))
        self._holds = step + 1
        tokens = [self._first([seen for _, seen in answers], replica) for replica in range(self.replicas)]
        metrics = combined([pairs for pairs, _ in self._one_each(answers)])
        steps = divided_to[0].count
        self.policy.trained += steps
        self.learned = Learned(metrics, steps, in_order(divided_to, tokens))
        return self.learned

    async def intact(self) -> bool:
        if self._lost:
            return False
        try:
            async with asyncio.timeout(GRACE):
                return all(await self._each(lambda rank, _: rank.is_intact()))
        except Exception:  # a rank that does not answer now holds what nothing is known about
            return False

    async def supervise(self, samples: Sequence[Sample], lr: float) -> dict[str, float]:
        async with self.turns.training():
            answers = await self._each(
                lambda rank, world: rank.supervise(list(samples[world.replica :: self.replicas]), lr)
            )
        return combined(self._one_each(answers))

    async def reset_optimizer(self) -> None:
        async with self.turns.holding(ALL_PARTS):
            await self._each(lambda rank, _: rank.reset_optimizer())

    async def log_probs(self, samples: Sequence[Sample], emulation: Emulation = AS_TRAINED) -> list[np.ndarray]:
        if self.engines is not None and (emulation.held is not None or emulation.through is not None):
            raise MilesError("the engine runs in another process, where the trainer cannot see its modules")
        return await self._scores(samples, lambda rank, mine: rank.log_probs(mine, emulation))

    async def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return await self._scores(samples, lambda rank, mine: rank.values(mine))

    async def top_log_probs(self, samples: Sequence[Sample], k: int) -> list[TopLogProbs]:
        return await self._scores(samples, lambda rank, mine: rank.top_log_probs(mine, k))

    async def take_snapshot(self, version: int) -> None:
        async with self.turns.holding(("weights",)):
            await self._each(lambda rank, _: rank.take_snapshot(version))
        self.snapshot_version = version

    async def rebuild(self, precisions: Precisions) -> None:
        async with self.turns.holding(("weights",)):
            await self._each(lambda rank, _: rank.rebuild(precisions))

    async def push(self, version: int, plain: bool = False) -> SyncReport:
        """Every engine gets the weights; where one is lost meanwhile, all of them again once it is replaced."""
        async with self.turns.pushing():
            while True:
                if self.engines is None:
                    return await self._pushed(version, plain)
                await self.engines.whole()
                try:
                    return await self._pushed(version, plain)
                except WorkerLost as lost:
                    self.engines.lost(lost)

    async def stage(self, version: int | None) -> None:
        if self.turns.taken:  # the engine does not generate while there is something to stage
            return
        if self.engines is None:
            await self._each(lambda rank, _: rank.stage(version))
            return
        try:
            await self.engines.whole()
            await self._connect()
            push = await self.engines.begin_push(self.ranks.names)
            await self._each(lambda rank, _: rank.stage(version, push))
        except WorkerLost as lost:
            self.engines.lost(lost)
            raise SyncError(str(lost)) from lost

    async def hold(self, parts: Sequence[TrainerPart]) -> None:
        """See ``Rank.hold``."""
        await self._each(lambda rank, _: rank.hold(parts))

    async def save(self, directory: Path) -> None:
        async with self.turns.holding(ALL_PARTS):
            await self._each(lambda rank, _: rank.save(directory.absolute()))

    async def load(self, directory: Path) -> None:
        async with self.turns.training():
            await self._each(lambda rank, _: rank.load(directory.absolute()))
        self._holds = None

    async def export(self, directory: Path) -> None:
        async with self.turns.holding(("weights",)):
            await self._each(lambda rank, _: rank.export(directory.absolute()))

    async def resend(self) -> None:
        """Give the engines the weights as they are now, without a step of the loop."""
        await self._pushed(self.run.step if self._holds is None else self._holds)

    def renewed(self, worlds: Sequence[World]) -> None:
        """The ranks were replaced by new ones, which know nothing of what was before."""
        self.worlds, self._connected, self._holds, self._lost = tuple(worlds), None, None, False
        self._turn = asyncio.Lock()

    async def _pushed(self, version: int, plain: bool = False) -> SyncReport:
        push = 0
        if self.engines is not None:
            await self._connect()
            push = await self.engines.begin_push(self.ranks.names)
        reports = await self._each(lambda rank, _: rank.push(version, plain, push))
        if self.engines is not None:
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
        engines = self.engines
        if engines is not None and self._connected != engines.renewed:
            self._connected = engines.renewed
            await self._each(lambda rank, _: rank.reach(engines.engines, engines.said))

    async def _scores(self, samples: Sequence[Sample], ask: Callable[[Rank, list[Sample]], list[T]]) -> list[T]:
        """What the ranks answer about each sample, in the order of the samples."""
        mine = shares(samples, [0] * len(samples), self.replicas)
        async with self.turns.holding(("weights",)):
            answers = await self._each(lambda rank, world: ask(rank, [samples[i] for i in mine[world.replica]]))
        found: dict[int, T] = {}
        for at, rows in zip(mine, self._one_each(answers), strict=True):
            found |= zip(at, rows, strict=True)
        return [found[i] for i in range(len(samples))]

    @overload
    async def _each(self, ask: Callable[[Rank, World], Awaitable[T]]) -> list[T]: ...
    @overload
    async def _each(self, ask: Callable[[Rank, World], T]) -> list[T]: ...
    async def _each(self, ask: Callable[[Rank, World], Any]) -> list[Any]:
        """What every rank answers to the call that ``ask`` makes of a rank at its place."""
        async with self._turn:
            calls = [
                asyncio.ensure_future(self._call(number, ask(_RANK, world))) for number, world in enumerate(self.worlds)
            ]
            try:
                answers = await gathered(calls)
            except WorkerLost as lost:
                self._lost = self._lost or lost.trains
                if not lost.trains and self.engines is not None:  # an engine: the other ranks must not wait for it
                    await self.engines.begin_push(self.ranks.names)
                    await asyncio.wait(calls)
                raise
            except Exception:
                # what a rank says whose peer died may arrive before the news of that death
                await asyncio.wait(calls, timeout=GRACE)
                for call in calls:
                    if call.done() and isinstance(error := call.exception(), WorkerLost):
                        self._lost = True
                        raise error from None
                raise
        self._waited([seconds for _, seconds in answers])
        return [answer for answer, _ in answers]

    async def _call(self, number: int, call: Call) -> tuple[Any, Mapping[str, float]]:
        """One rank's answer, and the seconds of its clock by phase."""
        found: tuple[Any, Mapping[str, float]] = await self.ranks.call(
            number, "at", self.run.step, call.method, *call.args, named=call.method
        )
        return found

    def _waited(self, clocks: Sequence[Mapping[str, float]]) -> None:
        """Give the driver's waiting to the phases that the slowest rank spent it in."""
        names = {name: None for clock in clocks for name in clock}
        if names:
            self.run.clock.waited({name: max(clock.get(name, 0.0) for clock in clocks) for name in names})

    def _first(self, answers: Sequence[Any], replica: int) -> Any:
        """The first answer of a rank of this replica that says something."""
        found = [answer for world, answer in zip(self.worlds, answers, strict=True) if world.replica == replica]
        return next(filter(None, found), [])

    def _one_each(self, answers: Sequence[T]) -> list[T]:
        """The answer of one rank of each replica."""
        return list({world.replica: answer for world, answer in zip(self.worlds, answers, strict=True)}.values())
