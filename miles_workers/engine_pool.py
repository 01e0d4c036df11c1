"""Presents several engines in separate processes as one engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from miles_core.contracts.engine import Engine, EnginePart, PauseMode, Request, Response
from miles_core.data.weight_unit import Encoded
from miles_core.data.world import ALONE, World
from miles_core.errors import MismatchError, WorkerLost
from miles_workers.engine_worker import EngineWorker
from miles_workers.least_loaded import LeastLoaded
from miles_workers.mailbox import Mailbox
from miles_workers.relay import is_relayed
from miles_workers.weight_block import BlockSender, Table
from miles_workers.workers import AsyncMethod, Method, P, Workers, gather_in_order

if TYPE_CHECKING:
    import torch

    from miles_core.data.media import Media

T = TypeVar("T")


class EnginePool(Engine):
    """Sends a request to the engine with the fewest requests in flight, keeps a group on one engine, and sends every other call to all
    engines.

    A rank has a pool to send its weights through. The driver's also has lost engines replaced (``replace_with``): a request that was in
    flight there is sent again, to another engine and with its key, and the new engine takes part from the next weights on.

    Args:
        engines: handle to the engine processes; each runs an ``EngineWorker``.
        build_info: the engines' common result of ``build``.
        bucket_size: bytes of weights that an engine receives at a time; the ranks that send share them.
        world: position of the rank that sends weights through this pool, among those that send.
        client: see ``Mailbox``.

    Attributes:
        serving: indexes of the engines that accept generation requests.
        replacements: number of replaced engines; after each replacement, ranks must be connected again.
        push: number of the current push; the pool of a rank receives it from the driver's pool.
        replaced: engine -> how often it was replaced.
        watchers: called when ``serving`` or ``failure`` has changed.
    """

    def __init__(
        self,
        engines: Workers,
        build_info: Mapping[str, Any],
        bucket_size: int = 1,
        world: World = ALONE,
        client: str = "",
    ) -> None:
        self.engines, self.build_info, self.world = engines, build_info, world
        self._blocks = BlockSender(world.bucket_bytes(bucket_size), engines.share, self._take)
        self.capabilities = build_info["capabilities"]
        self.kv_cache_dtype = build_info["kv_cache_dtype"]
        self.native_products = build_info["native_products"]
        self.receivers = len(engines)
        self.serving = set(range(len(engines)))
        self.replacements = self.push = 0
        self._alive = set(self.serving)
        self._version = -1
        self._mail = [Mailbox(engines, number, client) for number in range(len(engines))]
        self.replaced: Counter[int] = Counter()
        self.watchers: list[Callable[[], None]] = []
        self._reports: set[tuple[int, int]] = set()
        self._in_flight = LeastLoaded()
        self._groups: dict[int, list[int]] = {}
        self._sent: dict[int, int] = {}  # key -> engine, of requests in flight and of cancelled ones until ``abort``
        self._state: dict[Callable[..., Any], tuple[Any, ...]] = {}  # calls that a new engine must receive, too
        self._asleep: set[EnginePart] = set()
        self._senders: tuple[str, ...] = ()
        self._replace: Callable[[int, WorkerLost], Awaitable[None]] | None = None
        self._resend: Callable[[], Awaitable[None]] | None = None
        self._lost_engines: dict[int, WorkerLost] = {}
        #: Set if a new engine received no weights because this rank was lost while no other engine served.
        self._unsent: WorkerLost | None = None
        self._mending: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def model_facts(self) -> Mapping[str, object]:
        facts: Mapping[str, object] = self.build_info["model_facts"]
        return facts

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        dtypes: Mapping[str, torch.dtype] = self.build_info["weight_dtypes"]
        return dtypes

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        """Do nothing: ``EngineWorker.build`` starts the engines."""

    async def stop(self) -> None:
        """Stop replacing engines. The runtime that created the engines stops them."""
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait([self._mending])
            self._mending = None

    async def abandon(self) -> None:
        """End all engines without replacing them: the run stops and needs only the state of the ranks."""
        self._replace = None
        await self.stop()
        ended = WorkerLost(", ".join(self.engines.names), "it was ended because the run stops")
        for number in range(len(self.engines)):
            self.engines.unwatch(number)
            self._mail[number].close(ended)
        self._alive, self.serving = set(), set()
        await asyncio.gather(
            *(self.engines.declare_lost(n, "it was ended because the run stops") for n in range(len(self.engines)))
        )

    async def generate(self, request: Request) -> Response:
        while True:
            number = await self._choose(request.group)
            group = self._groups.setdefault(request.group, [number, 0])
            group[:] = number, group[1] + 1
            self._in_flight.add(number, 1)
            self._sent[request.key] = number
            cancelled = False
            try:
                return await self._mail[number].ask(request)
            except asyncio.CancelledError:
                cancelled = True  # the engine continues until ``abort``
                raise
            except WorkerLost as lost:
                self.replace_lost(lost)
            finally:
                if not cancelled:
                    self._sent.pop(request.key, None)
                self._in_flight.add(number, -1)
                group[1] -= 1
                if not group[1]:
                    self._groups.pop(request.group, None)

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        media: Sequence[tuple[Media, ...]] = (),
    ) -> list[np.ndarray]:
        while True:
            number = await self._choose()
            try:
                return await self.engines.call(number, Engine.score, sequences, temperature, media)
            except WorkerLost as lost:
                self.replace_lost(lost)

    async def score_each(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        media: Sequence[tuple[Media, ...]] = (),
    ) -> Mapping[str, list[np.ndarray]]:
        return await self._from_each(Engine.score, sequences, temperature, media)

    async def weight_checksums(self, names: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
        found = await self._from_each(Engine.weight_checksums, names)
        return {worker: of_engine[""] for worker, of_engine in found.items()}

    async def _from_each(self, method: AsyncMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> dict[str, T]:
        """Call a method of every serving engine; return worker name -> result, without engines that are lost meanwhile."""
        found: dict[str, T] = {}

        async def one(number: int) -> None:
            try:
                found[self.engines.names[number]] = await self.engines.call(number, method, *args, **kwargs)
            except WorkerLost as lost:
                self.replace_lost(lost)

        await gather_in_order(one(number) for number in sorted(self.serving))
        return found

    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        """Send this rank's units; return when every engine serves the units of all ranks."""
        count = await self._blocks.send(units, version)
        rank, ranks = self.world.rank, self.world.size
        await self._to_engines(EngineWorker.update, (version, rank, ranks, count))

    async def _take(self, number: int, table: Table, shared: Any, version: int) -> None:
        rank, ranks = self.world.rank, self.world.size
        await self._to_engines(EngineWorker.take, (rank, ranks, number, version, table), [shared])

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        await self._to_engines(EngineWorker.receive, ({**message, "push": self.push}, version, last))

    async def _to_engines(self, method: Callable[..., Any], args: tuple[Any, ...], shared: Sequence[Any] = ()) -> None:
        """Call ``method(push, *args, *shared)`` on all engines as a sender of weights, directly or through the relay of the first engine.

        Args:
            method: of ``EngineWorker``.
            args: its arguments after the number of the push.
            shared: further arguments, which ``Workers.share`` returned.
        """
        if not is_relayed(self.world.size, len(self.engines)):
            await self.engines.call_all(method, self.push, *args, *shared)
        else:
            relayed = (self.push, self.world.size, method.__name__, args, shared)
            await self.engines.call(0, EngineWorker.relay, *relayed)

    async def pause(self, mode: PauseMode = "abort") -> None:
        self._state[Engine.pause] = (mode,)
        if mode == "abort":  # engines return all requests
            self._sent.clear()
        await self._all(Engine.pause, mode)

    async def resume(self) -> None:
        self._state.pop(Engine.pause, None)
        await self._all(Engine.resume)

    async def abort(self, keys: Collection[int] | None = None) -> None:
        """Send each key to the engine with its request only: the messages grow with the keys, not with keys times engines."""
        if keys is None:
            self._sent.clear()
            await self._all(Engine.abort, None)
            return
        by_engine: dict[int, list[int]] = {}
        for key in keys:
            if (number := self._sent.pop(key, None)) in self._alive:
                by_engine.setdefault(number, []).append(key)
        await gather_in_order(self._call(number, Engine.abort, mine) for number, mine in by_engine.items())

    async def sleep(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        await self.whole()  # an engine under construction uses memory, and must receive this call too
        self._asleep |= {*parts}
        await self._all(Engine.sleep, parts)

    async def wake(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        await self.whole()
        self._asleep -= {*parts}
        await self._all(Engine.wake, parts)

    async def rebuild(self, precision: str) -> None:
        self._state[Engine.rebuild] = (precision,)
        await self._all(Engine.rebuild, precision)

    async def begin_push(self, ranks: Sequence[str] = ()) -> int:
        """Start a new push and return its number. Engines discard the buckets of earlier pushes and reject late messages of them.

        Args:
            ranks: names of the workers that will send weights.
        """
        self.push, self._senders = self.push + 1, tuple(ranks)
        await self._all(EngineWorker.begin_push, self.push, self._senders)
        return self.push

    def replace_with(
        self, replace: Callable[[int, WorkerLost], Awaitable[None]], resend: Callable[[], Awaitable[None]]
    ) -> None:
        """Replace lost engines from now on.

        Args:
            replace: builds a new engine without weights; raises if no replacement is allowed.
            resend: sends the learner's weights to all engines; called when no serving engine is left.
        """
        self._replace, self._resend = replace, resend

    def replace_lost(self, lost: WorkerLost) -> None:
        """Start the replacement of a lost engine; raise ``lost`` if engines are not replaced."""
        if self._replace is None or lost.worker not in self.engines.names:
            raise lost
        number = self.engines.names.index(lost.worker)
        if number in self._alive:
            self.serving.discard(number)
            self._alive.discard(number)
            self._lost_engines[number] = lost
            self._mail[number].close(lost)
            self._check_mending()
            if self._mending is None or self._mending.done():
                self._mending = asyncio.create_task(self._mend())
                self._mending.add_done_callback(lambda _: self._notify())
            self._notify()

    async def report_lost(self, number: int, replaced: int, cause: str) -> None:
        """Start the replacement of an engine that a rollout worker lost, unless it was ``replaced`` more often since."""
        report = number, replaced
        if number in self._alive and self.replaced[number] == replaced and report not in self._reports:
            self._reports.add(report)  # another worker may report it while its process is ended
            self.replace_lost(await self.engines.declare_lost(number, cause))

    @property
    def failure(self) -> Exception | None:
        """The error that requests raise because no engine can serve them, if any."""
        mending = self._mending
        ended = mending is not None and mending.done() and not mending.cancelled()
        if ended and isinstance(error := mending.exception(), Exception):  # type: ignore[union-attr]
            return error
        return None if self.serving else self._unsent

    async def forget(self, client: str) -> None:
        """Make the engines drop the requests of a client that has ended."""
        await self._all(EngineWorker.forget, client)

    def _notify(self) -> None:
        for watcher in self.watchers:
            watcher()

    async def whole(self) -> None:
        """Wait until all lost engines are replaced; raise the error that prevents it."""
        if self._mending is not None:
            await asyncio.shield(self._mending)

    async def check_served(self, version: int) -> None:
        """Check that all engines serve ``version``, and accept generation requests again.

        Raises:
            MismatchError: an engine reports another version.
        """
        found = await self.engines.call_all(EngineWorker.version)
        others = [f"{n} serves {v}" for n, v in zip(self.engines.names, found, strict=True) if v != version]
        if others:
            raise MismatchError(
                f"stale weights: version {version} was sent, but {', '.join(others)}; the update did not reach every engine"
            )
        self._version, self.serving, self._unsent = version, set(self._alive), None
        self._news.set()
        self._notify()

    def _check_mending(self) -> None:
        """Raise the error that ended the replacement of engines, if any."""
        if self._mending is not None and self._mending.done():
            self._mending.result()

    async def _mend(self) -> None:
        """Replace lost engines. If no serving engine is left, have the learner's weights sent again."""
        assert self._replace is not None and self._resend is not None
        try:
            while self._lost_engines or not (
                self.serving or self._asleep
            ):  # sleeping engines receive weights when they wake
                lost_engines, self._lost_engines = self._lost_engines, {}
                await gather_in_order(self._replace_engine(number, lost) for number, lost in lost_engines.items())
                if not (self.serving or self._asleep or self._lost_engines):
                    try:
                        await self._resend()
                    except WorkerLost as lost:
                        if lost.trains:  # requests fail with it; the trainer is rebuilt and pushes afterwards
                            self._unsent = lost
                            return
                        self.replace_lost(lost)
        finally:
            self._news.set()

    async def _replace_engine(self, number: int, lost: WorkerLost) -> None:
        assert self._replace is not None
        await self._replace(number, lost)
        self.replacements += 1
        self.replaced[number] += 1
        self._alive.add(number)
        for method, args in self._state.items():
            await self._call(number, method, *args)
        await self._call(number, EngineWorker.begin_push, self.push, self._senders)
        if self._asleep:
            await self._call(number, Engine.sleep, sorted(self._asleep))

    async def _all(self, method: Method[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all engines that are not lost."""
        await gather_in_order(self._call(number, method, *args, **kwargs) for number in sorted(self._alive))

    async def _call(self, number: int, method: Method[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call an engine; start its replacement if it is lost during the call."""
        try:
            await self.engines.call(number, method, *args, **kwargs)
        except WorkerLost as lost:
            self.replace_lost(lost)

    async def _choose(self, group: int | None = None) -> int:
        """Return the index of the engine with requests of ``group`` in flight, else of the one with the fewest requests."""
        while True:
            self._check_mending()
            if self.serving:
                break
            if self._unsent is not None:
                raise self._unsent
            self._news.clear()
            await self._news.wait()
        if group is not None and group in self._groups and self._groups[group][0] in self.serving:
            return self._groups[group][0]
        return self._in_flight.choose(self.serving)
