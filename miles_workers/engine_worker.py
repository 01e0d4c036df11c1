"""The worker of a generating process: holds one engine and receives its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from miles_core.contracts.engine import Engine, Request, Response
from miles_core.data.weight_unit import Encoded
from miles_core.errors import SyncError
from miles_core.mismatch.parity import check_side
from miles_core.precision.quantizer import SideParity
from miles_core.run.parts import freeze_gc
from miles_workers.inbox import Answers, Inbox, Letters
from miles_workers.relay import Call, Relay
from miles_workers.weight_block import Table, read_block
from miles_workers.worker import Worker, WorkerSpec
from miles_workers.workers import Workers


class EngineWorker(Worker):
    """One engine. Many calls may be in flight.

    - consumes: requests of the driver and of rollout workers (``post``), blocks of weights of the ranks (``take``).
    - waits: with the weights until all ranks have sent theirs; with requests while the engine is paused.
    - unblocks: the clients, with each complete response (``answers``); all ranks together, when the engine serves their weights (``update``).

    Every rank of the trainer sends weights in blocks (``take``) and then reports completion (``update``). An engine that receives the
    transport ``buckets`` loads each block at once, so this process holds one block of each sender. Other engines receive all tensors in
    one stream when all ranks are complete; until then the blocks are kept in host memory. If a rank or an engine dies during a push,
    incomplete blocks remain: ``begin_push`` discards them, and messages of an earlier push are rejected.
    """

    part: Engine

    def __init__(self, spec: WorkerSpec, policy: str) -> None:
        super().__init__(spec, policy)
        self._span: tuple[int, int, str] | None = None
        self._begin_empty()
        self._inboxes: dict[str, Inbox | None] = {}  # by client; None after ``forget``

    def _begin_empty(self) -> None:
        self._blocks: dict[int, list[tuple[Table, np.ndarray]]] = {}
        self._complete: dict[int, int] = {}
        self._served: asyncio.Future[None] | None = None
        self._installing = asyncio.Lock()
        self._push, self._senders = 0, tuple[str, ...]()
        self._counts: dict[int, int] = {}
        self._streams = False  # whether the engine loads buckets as they arrive
        self._engines: Workers | None = None
        self._relay: Relay | None = None

    def span(self, machines: int, index: int, address: str) -> None:
        """Build this machine's part of an engine that runs on several machines; see ``Engine.span``."""
        self._span = (machines, index, address)

    async def build(self) -> dict[str, Any]:
        """Create and start the engine; return the facts that a pool needs."""
        name = self.run.config.run.engine
        self.part = self.run.hooks.make("engine", name, run=self.run, policy=self.policy)
        if self._span is not None:
            self.part.span(*self._span)
        await self.part.start()
        self._streams = "transport:buckets" in self.part.capabilities
        freeze_gc()
        checked = "weight_checksums" in self.part.capabilities
        return {
            "capabilities": frozenset(self.part.capabilities),
            "weight_dtypes": dict(self.part.weight_dtypes()) if checked else {},
            "kv_cache_dtype": self.part.kv_cache_dtype,
            "native_products": bool(self.part.native_products),
            "model_facts": dict(self.part.model_facts()),
        }

    def check_parity(self, precision: str, real: Mapping[str, np.ndarray]) -> SideParity:
        """See ``mismatch.parity.check_side``."""
        layer = {name: torch.tensor(values) for name, values in real.items()}
        return check_side(self.run, self.policy, "engine", precision, self.part.quantizer, layer)

    async def _generate(self, request: Request) -> Response:
        """Generate, and convert recorded fields to their declared types here, so that they are passed on as they are."""
        response = await self.part.generate(request)
        for spec in self.run.fields:
            rows = response.extras.get(spec.name)
            if isinstance(rows, np.ndarray) and rows.dtype != spec.dtype:
                converted = rows.astype(spec.dtype)
                if np.array_equal(converted, rows):  # if values would change, the receiver raises the error
                    response.extras[spec.name] = converted
        return response

    def post(self, client: str, letters: Letters) -> None:
        """See ``Inbox.post``. client: "" for the driver, else the name of a rollout worker."""
        if (inbox := self._inbox_of(client)) is not None:
            inbox.post(letters)

    async def answers(self, client: str) -> Answers:
        """See ``Inbox.answers``; ``client`` as for ``post``."""
        inbox = self._inbox_of(client)
        return {} if inbox is None else await inbox.answers()

    async def forget(self, client: str) -> None:
        """Drop the requests of a client that has ended, also those that arrive later."""
        inbox = self._inboxes.get(client)
        self._inboxes[client] = None
        if inbox is not None and (keys := inbox.close()):
            await self.part.abort(keys)

    def _inbox_of(self, client: str) -> Inbox | None:
        return self._inboxes.setdefault(client, Inbox(self._generate))

    def version(self) -> int:
        """Return the version of the weights that the engine serves."""
        return self.part.version

    def beat(self) -> tuple[str, ...]:
        """Return the names of ranks with incomplete weights while other ranks wait for them."""
        if self._served is None or self._installing.locked():
            return ()
        return tuple(name for rank, name in enumerate(self._senders) if rank not in self._complete)

    async def begin_push(self, push: int, senders: Sequence[str]) -> None:
        """Discard the blocks of earlier pushes; see ``EnginePool.begin_push``."""
        self._push, self._senders = push, tuple(senders)
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        self._give_up()
        async with self._installing:  # an installation in progress completes before the next push
            pass

    async def take(
        self, push: int, rank: int, ranks: int, number: int, version: int, table: Table, data: np.ndarray
    ) -> None:
        """Load or store block ``number`` of one of ``ranks`` ranks (``weight_block``).

        Raises:
            SyncError: the push was abandoned, or an earlier block is missing.
        """
        self._check(push)
        count = self._counts.get(rank, 0)
        if number != count:
            raise SyncError(f"block {number} of rank {rank} came after {count} blocks: a message was lost")
        self._counts[rank] = count + 1
        if self._streams:
            await self._load(push, rank, ranks, number, read_block(table, data), version)
        else:
            self._blocks.setdefault(rank, []).append((table, data))

    async def update(self, push: int, version: int, rank: int, ranks: int, count: int) -> None:
        """Report that a rank has sent all its ``count`` blocks; return when the engine serves the weights of all ``ranks``.

        Raises:
            SyncError: the push was abandoned, a block is missing, or the ranks sent different versions.
        """
        self._check(push)
        if self._counts.get(rank, 0) != count:
            raise SyncError(f"{self._counts.get(rank, 0)} of {count} blocks of rank {rank} arrived")
        if self._served is None:
            self._served = asyncio.get_running_loop().create_future()
        served = self._served
        self._complete[rank] = version
        if len(self._complete) == ranks:
            await self._install(served, version)
        await asyncio.shield(served)

    def connect(self, engines: Workers) -> None:
        """Relay the calls of senders to these workers from now on. Called on the first engine's worker."""
        self._engines = engines

    async def relay(
        self, push: int, senders: int, method: str, args: tuple[Any, ...], shared: Sequence[Any] = ()
    ) -> None:
        """See ``Relay.call``."""
        self._check(push)
        assert self._engines is not None  # the driver connects the first engine before a push
        if self._relay is None:
            self._relay = Relay(self._engines, push, EngineWorker.deliver)
        await self._relay.call(senders, method, args, shared)

    async def deliver(
        self, push: int, calls: Sequence[Call], sizes: Sequence[int], *shared: Any
    ) -> list[Exception | None]:
        """Run calls of several senders concurrently; return the error of each. sizes: how many of ``shared`` each call receives."""
        rest = iter(shared)

        async def run(method: str, args: tuple[Any, ...], more: Sequence[Any]) -> Exception | None:
            try:
                await self.answer(method, push, *args, *more)
            except Exception as error:
                return error
            return None

        return list(
            await asyncio.gather(
                *(run(m, args, list(islice(rest, size))) for (m, args), size in zip(calls, sizes, strict=True))
            )
        )

    async def receive(self, push: int, message: Mapping[str, Any], version: int, last: bool) -> None:
        """Call ``Engine.receive`` for a message of the current push."""
        self._check(push)
        await self.part.receive(message, version, last)

    async def _install(self, served: asyncio.Future[None], version: int) -> None:
        """Pass the weights of all ranks to the engine, and complete the pending calls of ``update``."""
        error: Exception | None = None
        async with self._installing:
            try:
                if {*self._complete.values()} != {version}:
                    raise SyncError(f"ranks send different versions: {self._complete}")
                if self._streams:
                    for rank in sorted(self._complete):
                        number, ranks = self._counts.get(rank, 0), len(self._complete)
                        await self._load(self._push, rank, ranks, number, iter(()), version, last=True)
                else:
                    await self.part.update_weights(_units(self._blocks), version)
            except Exception as caught:
                error = caught
        if served.done():  # the push was abandoned in the meantime
            return
        if error is None:
            served.set_result(None)
        else:
            served.set_exception(error)
        self._forget()

    async def _load(
        self, push: int, rank: int, ranks: int, number: int, units: Iterator[Encoded], version: int, last: bool = False
    ) -> None:
        """Pass a block to the engine, in the form of the transport ``buckets``."""
        message = {
            "sender": (rank, ranks),
            "number": number,
            "push": push,
            "memory": {"kind": "units", "units": units},
        }
        await self.part.receive(message, version, last)

    def _check(self, push: int) -> None:
        if push != self._push:
            raise SyncError(f"push {push} of the weights was given up: this engine takes push {self._push}")

    def _give_up(self) -> None:
        if self._served is not None and not self._served.done():
            self._served.set_exception(SyncError("this push of the weights was given up"))
            self._served.exception()  # mark as retrieved: possibly no rank waits for it any more
        self._forget()

    def _forget(self) -> None:
        self._blocks, self._complete, self._served = {}, {}, None
        self._counts = {}

    async def close(self) -> None:
        if self.part is not None:
            await self.part.stop()
        await super().close()


def _units(blocks: Mapping[int, list[tuple[Table, np.ndarray]]]) -> Iterator[Encoded]:
    """Yield the tensors of all ranks; each block is released after it was read."""
    for _, sent in sorted(blocks.items()):
        while sent:
            yield from read_block(*sent.pop(0))
