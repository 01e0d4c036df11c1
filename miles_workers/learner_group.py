"""The driver's handle to the trainer of a policy whose ranks are in other processes.

Each method calls all ranks, because most calls are collectives, and merges their results. ``miles_core.train.local_learner`` is the handle
to a trainer in the driver's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, TypeVar, overload

import numpy as np

from miles_core.checkpoint.digest import FileDigest
from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.run import Policy, Run
from miles_core.contracts.runtime import Gradients, Learned, LearnerHandle
from miles_core.contracts.trainer import ALL_PARTS, Pass, TrainerPart
from miles_core.contracts.transport import SyncReport
from miles_core.data.sample import Sample
from miles_core.data.world import World
from miles_core.errors import MilesError, SyncError, WorkerLost
from miles_core.precision.schedule import Precisions
from miles_core.train.data_shard import Pairs, divide_samples, merge_metrics, merge_recorded, split_by_replica
from miles_core.train.memory import memory_of
from miles_core.train.named_losses import check_loss, vocabulary_of
from miles_core.train.rank import Rank
from miles_workers.engine_pool import EnginePool
from miles_workers.engine_worker import EngineWorker
from miles_workers.rank_worker import RankWorker
from miles_workers.relay import is_relayed
from miles_workers.remote_tokens import refer_tokens
from miles_workers.sample_list import SampleList, pack_shard
from miles_workers.workers import GRACE, AsyncMethod, Method, P, Workers, first_error

S = TypeVar("S")
T = TypeVar("T")


class LearnerGroup(LearnerHandle):
    """Sends each call to all ranks, and splits samples among the ranks by replica.

    Args:
        run: the driver's run.
        policy: the policy of the trainer.
        ranks: handle to the workers; each holds a ``Rank``.
        worlds: position of each rank in the data, tensor and pipeline dimensions.
        engines: receive the weights, and lost ones are replaced from now on; None for a policy that does not generate.

    Attributes:
        lost: the loss of a rank. No rank receives a call from then on, until ``reset_ranks``: they are replaced, and new ranks are not
            built yet.
    """

    def __init__(
        self, run: Run, policy: Policy, ranks: Workers, worlds: Sequence[World], engines: EnginePool | None = None
    ) -> None:
        super().__init__(run, policy)
        self.ranks, self.engines, self.worlds = ranks, engines, tuple(worlds)
        self.memory = memory_of(run, self.hold, engines)
        self._turn = asyncio.Lock()  # ranks take one call at a time
        self._connected: int | None = None
        self.lost: WorkerLost | None = None

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas of the model."""
        return self.worlds[0].replicas

    async def learn(self, samples: Sequence[Sample], step: int) -> Learned:
        await self.check_learns(samples)
        options = self.run.config_of(self.policy).train
        divided = split_by_replica(samples, options, self.replicas, self.policy.version)
        sent = [self.ranks.share(pack_shard(shard)) for shard in divided]
        async with self.memory.train():
            answers = await self._gather(lambda number, world: self._learn(number, sent[world.replica], step))
        tokens = [self._first([seen for _, seen in answers], replica) for replica in range(self.replicas)]
        metrics = merge_metrics([pairs for pairs, _ in self._one_per_replica(answers)])
        return self.record_learned(Learned(metrics, divided[0].count, merge_recorded(divided, tokens)), step)

    async def is_intact(self) -> bool:
        try:
            async with asyncio.timeout(GRACE):
                return all(await self._all(Rank.is_intact))
        except Exception:  # the state of a rank that does not respond is unknown
            return False

    async def supervise(self, samples: Sequence[Sample], lr: float) -> dict[str, float]:
        parts = [list(samples[replica :: self.replicas]) for replica in range(self.replicas)]
        async with self.memory.train():
            answers = await self._each(Rank.supervise, parts, lr)
        return merge_metrics(self._one_per_replica(answers))

    async def forward_backward(
        self, samples: Sequence[Sample], loss: str, settings: Mapping[str, float] | None = None
    ) -> Gradients:
        self.require_training()
        check_loss(samples, loss, settings or {}, vocabulary_of(self.run))
        mine = divide_samples(samples, [0] * len(samples), self.replicas)
        parts: list[list[Sample]] = [SampleList(samples[i] for i in at) for at in mine]
        async with self.memory.train():
            try:
                answers = await self._each(Rank.forward_backward, parts, loss, settings or {})
            except MilesError:
                if self.lost is None:  # a rank that succeeded holds gradients that the others have dropped
                    await self._all(Rank.drop_gradients)
                raise
        found: dict[int, np.ndarray] = {}
        for replica, at in enumerate(mine):
            found |= zip(at, self._first([each for _, each in answers], replica), strict=True)
        metrics = merge_metrics(self._one_per_replica([pairs for pairs, _ in answers]))
        return Gradients(metrics, [found[i] for i in range(len(samples))])

    async def optimizer_step(self, lr: float | None = None) -> dict[str, float]:
        async with self.memory.train():
            answers = await self._all(Rank.apply_gradients, lr)
        self.policy.trained += 1
        return merge_metrics(self._one_per_replica(answers))

    async def reset_optimizer(self) -> None:
        async with self.memory.read(ALL_PARTS):
            await self._all(Rank.reset_optimizer)

    async def columns(
        self,
        samples: Sequence[Sample],
        kind: Pass,
        wanted: Collection[str],
        top_k: int = 0,
        emulation: Emulation = AS_TRAINED,
    ) -> list[dict[str, np.ndarray]]:
        if self.engines is not None and (emulation.held is not None or emulation.through is not None):
            raise MilesError("the engine runs in another process, where the trainer cannot see its modules")
        return await self._scores(Rank.columns, samples, tuple(wanted), top_k, kind, emulation)

    async def sent_checksums(self) -> Mapping[str, int]:
        found = await self._all(Rank.sent_checksums)
        return {name: value for checksums in found for name, value in checksums.items()}

    async def take_snapshot(self, version: int) -> None:
        async with self.memory.read(("weights",)):
            await self._all(Rank.take_snapshot, version)
        self.snapshot_version = version

    async def rebuild(self, precisions: Precisions) -> None:
        async with self.memory.read(("weights",)):
            await self._all(Rank.rebuild, precisions)

    async def push(self, version: int, plain: bool = False) -> SyncReport:
        """Send the weights to every engine; if an engine is lost in the meantime, send them again after its replacement."""
        async with self.memory.push():
            while True:
                await self._pool.whole()
                try:
                    return await self._push(version, plain)
                except WorkerLost as lost:
                    self._replace_engine(lost)

    async def stage(self, version: int | None) -> None:
        if self.memory.colocated:  # the engine does not generate during training, so staging has no benefit
            return
        try:
            await self._pool.whole()
            await self._connect()
            push = await self._pool.begin_push(self._sender_names)
            await self._all(RankWorker.stage, version, push)
        except WorkerLost as lost:
            self._replace_engine(lost)
            raise SyncError(str(lost)) from lost

    async def hold(self, parts: Sequence[TrainerPart]) -> None:
        """See ``Rank.hold``."""
        await self._all(Rank.hold, parts)

    async def save(self, directory: Path, later: bool = False) -> None:
        async with self.memory.read(ALL_PARTS):
            await self._all(Rank.save, directory.absolute(), later)

    async def collect_digests(self) -> Mapping[str, FileDigest] | None:
        found = await self._all(Rank.collect_digests)
        if any(digests is None for digests in found):
            return None
        return {file: digest for digests in found for file, digest in (digests or {}).items()}

    async def load(self, directory: Path) -> None:
        async with self.memory.train():
            await self._all(Rank.load, directory.absolute())
        self.pending, self.unsynced = None, True

    async def configure(self, options: Mapping[str, float]) -> None:
        self.check_changeable(options)
        await self._all(Rank.configure, options)
        self.policy.options = {**self.policy.options, **options}

    async def export(self, directory: Path) -> None:
        async with self.memory.read(("weights",)):
            await self._all(Rank.export, directory.absolute())

    async def resend(self) -> None:
        """Send the current weights to the engines again, outside the training loop."""
        await self._push(self.current_version)

    def reset_ranks(self, worlds: Sequence[World]) -> None:
        """Reset this handle after all ranks were replaced by new ones without state."""
        self.worlds, self._connected, self.pending, self.lost = tuple(worlds), None, None, None
        self._turn = asyncio.Lock()

    @property
    def _pool(self) -> EnginePool:
        if self.engines is None:
            raise RuntimeError(f"the policy {self.policy.name} has no engine")
        return self.engines

    async def _push(self, version: int, plain: bool = False) -> SyncReport:
        await self._connect()
        push = await self._pool.begin_push(self._sender_names)
        reports = await self._all(RankWorker.push, version, plain, push)
        await self._pool.check_served(version)
        self.pending, self.unsynced = None, False
        return SyncReport(
            version,
            sum(r.nbytes for r in reports),
            sum(r.tensors for r in reports),
            max(r.seconds for r in reports),
            max(reports, key=lambda r: r.nbytes).metrics,
        )

    async def _connect(self) -> None:
        """Connect the ranks to the engines if engines were replaced since the last connection."""
        pool = self._pool
        if self._connected != pool.replacements:
            self._connected = pool.replacements
            if is_relayed(len(self._senders), len(pool.engines)):
                await pool.engines.call(0, EngineWorker.connect, pool.engines)
            await self._all(RankWorker.connect_engines, pool.engines, pool.build_info, self._senders)

    def _replace_engine(self, lost: WorkerLost) -> None:
        """Replace an engine whose loss a rank reported, unless engines were replaced since the ranks were connected: the report is then
        about the process before, and the next push finds out whether another one is lost."""
        if lost.trains or self._connected == self._pool.replacements:
            self._pool.replace_lost(lost)

    @property
    def _senders(self) -> tuple[int, ...]:
        return tuple(number for number, world in enumerate(self.worlds) if world.sends)

    @property
    def _sender_names(self) -> tuple[str, ...]:
        return tuple(self.ranks.names[number] for number in self._senders)

    async def _scores(
        self,
        method: Callable[Concatenate[Any, list[Sample], P], list[T]],
        samples: Sequence[Sample],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Compute values per sample on the ranks; return them in the order of the samples."""
        mine = divide_samples(samples, [0] * len(samples), self.replicas)
        parts: list[list[Sample]] = [SampleList(samples[i] for i in at) for at in mine]
        async with self.memory.read(("weights",)):
            answers = await self._each(method, parts, *args, **kwargs)
        found: dict[int, T] = {}
        for at, rows in zip(mine, self._one_per_replica(answers), strict=True):
            found |= zip(at, rows, strict=True)
        return [found[i] for i in range(len(samples))]

    @overload
    async def _all(self, method: AsyncMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    @overload
    async def _all(self, method: Method[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    async def _all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every rank with the same arguments; return the results by rank."""
        return await self._gather(lambda number, _: self._call(number, method, *args, **kwargs))

    async def _each(
        self, method: Callable[Concatenate[Any, S, P], T], parts: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method of every rank with the part of its replica, and with the same further arguments; return the results by rank."""
        return await self._gather(
            lambda number, world: self._call(number, method, parts[world.replica], *args, **kwargs)
        )

    async def _gather(
        self, call: Callable[[int, World], Coroutine[Any, Any, tuple[T, Mapping[str, float]]]]
    ) -> list[T]:
        """Await ``call(number, world)`` of every rank, which returns its result and the seconds of its clock by phase; return the results by
        rank."""
        async with self._turn:
            if self.lost is not None:
                raise self.lost
            calls = [asyncio.ensure_future(call(number, world)) for number, world in enumerate(self.worlds)]
            try:
                error = await first_error(
                    calls
                )  # the error of a rank whose peer died may arrive before the death itself is reported
            except asyncio.CancelledError:
                for each in calls:
                    each.cancel()
                raise
            if isinstance(error, WorkerLost) and error.trains:
                self.lost = error
            elif (
                isinstance(error, WorkerLost) and self.engines is not None
            ):  # the other ranks must not wait for the lost engine
                await self.engines.begin_push(self._sender_names)
                await asyncio.wait(calls)
            if error is not None:
                raise error
            answers = [each.result() for each in calls]
        self._attribute_wait([seconds for _, seconds in answers])
        return [answer for answer, _ in answers]

    async def _call(
        self, number: int, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[T, Mapping[str, float]]:
        """Call a method of one rank; return its result and its clock's seconds by phase."""
        assert not kwargs, "arguments are sent by position"
        name = method.__name__
        answer = self.ranks.send(number, RankWorker.at.__name__, self.run.step, name, *args)
        found: tuple[T, Mapping[str, float]] = await self.ranks.await_answer(number, answer, name)
        return found

    async def _learn(self, number: int, shard: Any, step: int) -> tuple[tuple[Pairs, Any], Mapping[str, float]]:
        """Call ``Rank.learn`` of one rank as ``_call`` does. What it recorded stays in its process."""
        answer = self.ranks.send_stored(number, RankWorker.learn_stored.__name__, self.run.step, shard, step)
        ((pairs, count), seconds), stored = await self.ranks.await_answer(number, answer, Rank.learn.__name__)
        return (pairs, refer_tokens(count, stored[0]) if count else []), seconds

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
