"""The driver's handle to all ranks of a policy's trainer, in separate processes or one rank in the driver's process.

With ``--colocate``, trainer and engine of a policy take turns on the same devices (``TakingTurns``). The trainer releases its memory
while the engine generates, and the engine while the trainer learns. During a push both keep only their weights in memory: neither the
trainer's optimizer state nor the engine's cache. The calls to the learner determine the turn, so no other part has to handle it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numpy as np

from miles_core.checkpoint.digest import FileDigest
from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.engine import Engine
from miles_core.contracts.run import Policy, Run
from miles_core.contracts.runtime import CHANGEABLE, Learned, LearnerHandle, TopLogProbs
from miles_core.contracts.trainer import ALL_PARTS, Pass, TrainerPart
from miles_core.contracts.transport import SyncReport
from miles_core.data.sample import Sample
from miles_core.data.world import World
from miles_core.errors import ConfigError, MilesError, SyncError, WorkerLost
from miles_core.precision.schedule import Precisions
from miles_core.train.share import merge_metrics, merge_recorded, shares, split_by_replica
from miles_runtime.engine_front import ENGINE_WORKER, EngineFront
from miles_runtime.rank import Rank
from miles_runtime.relay import is_relayed
from miles_runtime.remote_tokens import refer_tokens
from miles_runtime.sample_list import SampleList, pack_share
from miles_runtime.workers import GRACE, RECORDER, Call, Workers, gather_in_order

#: Makes the trainer keep exactly these parts in device memory.
Hold = Callable[[Sequence[TrainerPart]], Awaitable[object]]


class Turns:
    """Trainer and engine have separate devices, so no memory has to be moved."""

    #: whether trainer and engine take turns
    taken = False

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


class TakingTurns(Turns):
    """Trainer and engine share devices.

    Args:
        run: its clock measures the moves.
        hold: moves the trainer's parts.
        engine: the engine of the same policy.
    """

    taken = True

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
        """During the engine's turn, the engine releases the memory of its cache: requests in flight are aborted, and their callers
        continue them later."""
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


T = TypeVar("T")

#: Records calls to a rank.
RANK = cast(Rank, RECORDER)


class LearnerFront(LearnerHandle):
    """Sends each call to all ranks, and splits samples among the ranks by replica.

    Args:
        run: the driver's run.
        policy: the policy of the trainer.
        ranks: handle to the workers; each holds a ``Rank``.
        worlds: position of each rank in the data, tensor and pipeline dimensions.
        engine: receives the weights. Lost engines of an ``EngineFront`` are replaced from now on; an engine in this process is
            already connected to the rank. None for a policy that does not generate.

    Attributes:
        check: called with the samples of each ``learn`` first; may raise a MilesError.
        lost: the loss of a rank. No rank receives a call from then on, until ``reset_ranks``: they are replaced, and new ranks are not
            built yet.
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
        self._holds: int | None = None  # the step whose weights are trained but not pushed yet
        self._connected: int | None = None
        self.check: Callable[[Sequence[Sample]], Awaitable[None]] | None = None
        self.lost: WorkerLost | None = None

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas of the model."""
        return self.worlds[0].replicas

    async def learn(self, samples: Sequence[Sample], step: int) -> Learned:
        if not self.policy.learns:
            raise ConfigError(
                f"the policy {self.policy.name} is frozen and cannot learn; give it the role train or critic"
            )
        if self.check is not None:
            await self.check(samples)
        divided_to = split_by_replica(samples, self.run.config_of(self.policy).train, self.replicas)
        sent = [self.ranks.share(pack_share(share)) for share in divided_to]
        async with self.turns.train():
            answers = await self._each(lambda rank, world: rank.learn(sent[world.replica], step))
        self._holds = step + 1
        tokens = [self._first([seen for _, seen in answers], replica) for replica in range(self.replicas)]
        metrics = merge_metrics([pairs for pairs, _ in self._one_per_replica(answers)])
        steps = divided_to[0].count
        self.policy.trained += steps
        self.learned = Learned(metrics, steps, merge_recorded(divided_to, tokens))
        return self.learned

    async def is_intact(self) -> bool:
        try:
            async with asyncio.timeout(GRACE):
                return all(await self._each(lambda rank, _: rank.is_intact()))
        except Exception:  # the state of a rank that does not respond is unknown
            return False

    async def supervise(self, samples: Sequence[Sample], lr: float) -> dict[str, float]:
        async with self.turns.train():
            answers = await self._each(
                lambda rank, world: rank.supervise(list(samples[world.replica :: self.replicas]), lr)
            )
        return merge_metrics(self._one_per_replica(answers))

    async def reset_optimizer(self) -> None:
        async with self.turns.read(ALL_PARTS):
            await self._each(lambda rank, _: rank.reset_optimizer())

    async def log_probs(self, samples: Sequence[Sample], emulation: Emulation = AS_TRAINED) -> list[np.ndarray]:
        if self.engines is not None and (emulation.held is not None or emulation.through is not None):
            raise MilesError("the engine runs in another process, where the trainer cannot see its modules")
        return await self._scores(samples, lambda rank, mine: rank.log_probs(mine, emulation))

    async def columns(
        self, samples: Sequence[Sample], kind: Pass, wanted: Collection[str]
    ) -> list[dict[str, np.ndarray]]:
        return await self._scores(samples, lambda rank, mine: rank.columns(mine, tuple(wanted), 0, kind))

    async def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return await self._scores(samples, lambda rank, mine: rank.values(mine))

    async def top_log_probs(self, samples: Sequence[Sample], k: int) -> list[TopLogProbs]:
        return await self._scores(samples, lambda rank, mine: rank.top_log_probs(mine, k))

    async def take_snapshot(self, version: int) -> None:
        async with self.turns.read(("weights",)):
            await self._each(lambda rank, _: rank.take_snapshot(version))
        self.snapshot_version = version

    async def rebuild(self, precisions: Precisions) -> None:
        async with self.turns.read(("weights",)):
            await self._each(lambda rank, _: rank.rebuild(precisions))

    async def push(self, version: int, plain: bool = False) -> SyncReport:
        """Send the weights to every engine; if an engine is lost in the meantime, send them again after its replacement."""
        async with self.turns.push():
            while True:
                if self.engines is None:
                    return await self._push(version, plain)
                await self.engines.whole()
                try:
                    return await self._push(version, plain)
                except WorkerLost as lost:
                    self._replace_engine(self.engines, lost)

    async def sent_checksums(self) -> Mapping[str, int]:
        found = await self._each(lambda rank, _: rank.sent_checksums())
        return {name: value for checksums in found for name, value in checksums.items()}

    async def stage(self, version: int | None) -> None:
        if self.turns.taken:  # the engine does not generate during training, so staging has no benefit
            return
        if self.engines is None:
            await self._each(lambda rank, _: rank.stage(version))
            return
        try:
            await self.engines.whole()
            await self._connect()
            push = await self.engines.begin_push(self._sender_names)
            await self._each(lambda rank, _: rank.stage(version, push))
        except WorkerLost as lost:
            self._replace_engine(self.engines, lost)
            raise SyncError(str(lost)) from lost

    async def hold(self, parts: Sequence[TrainerPart]) -> None:
        """See ``Rank.hold``."""
        await self._each(lambda rank, _: rank.hold(parts))

    async def save(self, directory: Path, later: bool = False) -> None:
        async with self.turns.read(ALL_PARTS):
            await self._each(lambda rank, _: rank.save(directory.absolute(), later))

    async def collect_digests(self) -> Mapping[str, FileDigest] | None:
        found = await self._each(lambda rank, _: rank.collect_digests())
        if any(digests is None for digests in found):
            return None
        return {file: digest for digests in found for file, digest in (digests or {}).items()}

    async def load(self, directory: Path) -> None:
        async with self.turns.train():
            await self._each(lambda rank, _: rank.load(directory.absolute()))
        self._holds, self.unsynced = None, True

    async def configure(self, options: Mapping[str, float]) -> None:
        if unknown := sorted({*options} - {*CHANGEABLE}):
            raise ConfigError(
                f"the option {unknown[0]} of the policy {self.policy.name} cannot change during a run; those that can are "
                f"{', '.join(CHANGEABLE)}"
            )
        await self._each(lambda rank, _: rank.configure(options))
        self.policy.options = {**self.policy.options, **options}

    async def export(self, directory: Path) -> None:
        async with self.turns.read(("weights",)):
            await self._each(lambda rank, _: rank.export(directory.absolute()))

    async def resend(self) -> None:
        """Send the current weights to the engines again, outside the training loop."""
        await self._push(self.run.step if self._holds is None else self._holds)

    def reset_ranks(self, worlds: Sequence[World]) -> None:
        """Reset this handle after all ranks were replaced by new ones without state."""
        self.worlds, self._connected, self._holds, self.lost = tuple(worlds), None, None, None
        self._turn = asyncio.Lock()

    async def _push(self, version: int, plain: bool = False) -> SyncReport:
        push = 0
        if self.engines is not None:
            await self._connect()
            push = await self.engines.begin_push(self._sender_names)
        reports = await self._each(lambda rank, _: rank.push(version, plain, push))
        if self.engines is not None:
            await self.engines.check_served(version)
        self._holds, self.unsynced = None, False
        return SyncReport(
            version,
            sum(r.nbytes for r in reports),
            sum(r.tensors for r in reports),
            max(r.seconds for r in reports),
            max(reports, key=lambda r: r.nbytes).metrics,
        )

    async def _connect(self) -> None:
        """Connect the ranks to the engines if engines were replaced since the last connection."""
        engines = self.engines
        if engines is not None and self._connected != engines.renewed:
            self._connected = engines.renewed
            if is_relayed(len(self._senders), len(engines.engines)):
                await engines.engines.ask(0, ENGINE_WORKER.connect(engines.engines))  # type: ignore[func-returns-value]
            await self._each(lambda rank, _: rank.reach(engines.engines, engines.said, self._senders))

    def _replace_engine(self, engines: EngineFront, lost: WorkerLost) -> None:
        """Replace an engine whose loss a rank reported, unless engines were replaced since the ranks were connected: the report is then
        about the process before, and the next push finds out whether another one is lost."""
        if lost.trains or self._connected == engines.renewed:
            engines.replace_lost(lost)

    @property
    def _senders(self) -> tuple[int, ...]:
        return tuple(number for number, world in enumerate(self.worlds) if world.sends)

    @property
    def _sender_names(self) -> tuple[str, ...]:
        return tuple(self.ranks.names[number] for number in self._senders)

    async def _scores(self, samples: Sequence[Sample], ask: Callable[[Rank, list[Sample]], list[T]]) -> list[T]:
        """Compute values per sample on the ranks; return them in the order of the samples."""
        mine = shares(samples, [0] * len(samples), self.replicas)
        async with self.turns.read(("weights",)):
            answers = await self._each(
                lambda rank, world: ask(rank, SampleList(samples[i] for i in mine[world.replica]))
            )
        found: dict[int, T] = {}
        for at, rows in zip(mine, self._one_per_replica(answers), strict=True):
            found |= zip(at, rows, strict=True)
        return [found[i] for i in range(len(samples))]

    @overload
    async def _each(self, ask: Callable[[Rank, World], Awaitable[T]]) -> list[T]: ...
    @overload
    async def _each(self, ask: Callable[[Rank, World], T]) -> list[T]: ...
    async def _each(self, ask: Callable[[Rank, World], Any]) -> list[Any]:
        """Call every rank; ``ask`` builds the call from a recorder and the rank's world. Return the results by rank."""
        async with self._turn:
            if self.lost is not None:
                raise self.lost
            calls = [
                asyncio.ensure_future(self._call(number, ask(RANK, world))) for number, world in enumerate(self.worlds)
            ]
            try:
                answers = await gather_in_order(calls)
            except WorkerLost as lost:
                if lost.trains:
                    self.lost = lost
                elif self.engines is not None:  # a lost engine: the other ranks must not wait for it
                    await self.engines.begin_push(self._sender_names)
                    await asyncio.wait(calls)
                raise
            except Exception:
                # the error of a rank whose peer died may arrive before the death itself is reported
                await asyncio.wait(calls, timeout=GRACE)
                for call in calls:
                    if call.done() and isinstance(error := call.exception(), WorkerLost):
                        self.lost = error if error.trains else self.lost
                        raise error from None
                raise
        self._attribute_wait([seconds for _, seconds in answers])
        return [answer for answer, _ in answers]

    async def _call(self, number: int, call: Call) -> tuple[Any, Mapping[str, float]]:
        """Call one rank; return its result and its clock's seconds by phase. What ``learn`` recorded stays in a rank's process."""
        if call.method == "learn" and self.ranks.apart:
            answer = self.ranks.send_stored(number, "learn_stored", self.run.step, *call.args)
            ((pairs, count), seconds), blobs = await self.ranks.await_answer(number, answer, "learn")
            return (pairs, refer_tokens(count, blobs[0]) if count else []), seconds
        found: tuple[Any, Mapping[str, float]] = await self.ranks.call(
            number, "at", self.run.step, call.method, *call.args, named=call.method
        )
        return found

    def _attribute_wait(self, clocks: Sequence[Mapping[str, float]]) -> None:
        """Attribute the driver's waiting time to the phases of the slowest rank."""
        names = {name: None for clock in clocks for name in clock}
        if names:
            self.run.clock.add_waiting({name: max(clock.get(name, 0.0) for clock in clocks) for name in names})

    def _first(self, answers: Sequence[Any], replica: int) -> Any:
        """Return the first non-empty result of the ranks of this replica."""
        found = [answer for world, answer in zip(self.worlds, answers, strict=True) if world.replica == replica]
        return next(filter(None, found), [])

    def _one_per_replica(self, answers: Sequence[T]) -> list[T]:
        """Return the result of one rank per replica."""
        return list({world.replica: answer for world, answer in zip(self.worlds, answers, strict=True)}.values())
