"""The receiver's side of the transport ``buckets``: opens buckets in any kind of memory, tracks those of every rank and finishes complete
versions."""

from __future__ import annotations

import asyncio
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from miles_core.data.weight_unit import Encoded
from miles_core.errors import SyncError
from miles_workers.transport import delta
from miles_workers.transport.broadcast import Broadcast
from miles_workers.transport.bucket import unpack
from miles_workers.transport.device_memory import attach, read_loan


class Inbox:
    """Opens the buckets of messages, and keeps attached memory, process groups and bases of differences for the following ones.

    A message's ``memory`` is ``{"kind": ..., ...}`` with the fields of its kind:

    - ``file``: memory of this host with a name in the file system (``key``, ``path``), from byte ``start`` on. With ``stays`` its
      tensors are ``lasting``: the sender does not change them until a later version is served;
    - ``device``: GPU memory (``DeviceMemory``);
    - ``loan``: the sender's own tensors on a GPU (``Loan``);
    - ``broadcast``: bytes that arrive through a process group (``Broadcast``), so the message must be passed to ``fetch`` first;
    - ``units``: decoded tensors of this process (``units``), without a checksum;
    - ``data``: bytes inside the message (``data``). With ``keep`` (the bucket's name) and ``version``, they become a base;
    - ``delta``: ``data`` is the difference (``delta``) to the ``base``, [version, checksum], stored under the name ``keep``.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, Callable[[Mapping[str, Any]], Tensor]] = {
            "file": lambda where: self._attach(where, _file)[where.get("start", 0) :],
            "device": lambda where: self._attach(where, attach),
            "data": _data,
            "delta": self._apply_delta,
            "here": lambda where: where["flat"],
        }
        self._memory: dict[str, Tensor] = {}
        self._used: set[str] = set()
        self._used_before: set[str] = set()
        self._bases: dict[str, tuple[list[int], Tensor]] = {}
        self._groups: dict[str, Broadcast] = {}

    async def fetch(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the message with its bytes available. Receives bytes that travel outside the message, without blocking the event loop;
        returns other messages unchanged.

        Raises:
            SyncError: the bytes did not arrive.
        """
        where = message.get("memory", {})
        if where.get("kind") != "broadcast":
            return message
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else 0
        flat = await asyncio.to_thread(self._receive_broadcast, where, message["nbytes"], gpu)
        return {**message, "memory": {"kind": "here", "flat": flat}}

    def open(self, message: Mapping[str, Any]) -> Iterator[Encoded]:
        """Yield the tensors of a message, as views of memory that the sender keeps until ``receive`` returns. Read all of them: the
        checksum is verified at the end.

        Raises:
            SyncError: this process cannot access the memory, or its bytes differ from those sent.
        """
        where = message["memory"]
        if where["kind"] == "loan":
            yield from read_loan(message, lambda key: self._attach(where["regions"][key], attach))
            return
        if where["kind"] == "units":
            yield from where["units"]
            return
        if where["kind"] not in self._kinds:
            raise SyncError(
                f"weights arrived in memory of the kind {where['kind']!r}, which this engine does not support"
            )
        flat = self._kinds[where["kind"]](where)
        for unit in unpack(message, flat):
            unit.lasting = where.get("stays", False) and not unit.format
            yield unit
        if "keep" in where:
            self._bases[where["keep"]] = [where["version"], message["checksum"]], flat

    def finish(self) -> None:
        """Detach memory that neither this update nor the previous one used; the sender may alternate between two versions."""
        used = self._used | self._used_before
        self._memory = {key: memory for key, memory in self._memory.items() if key in used}
        self._used, self._used_before = set(), self._used

    def detach(self) -> None:
        """Detach all memory of the sender."""
        self._memory, self._used = {}, set()

    def forget(self) -> None:
        """Drop everything after a failed update: stored bases no longer match the sender's."""
        self.detach()
        self._bases = {}
        for group in self._groups.values():
            group.close()
        self._groups = {}

    def _attach(self, where: Mapping[str, Any], attach: Callable[[Mapping[str, Any]], Tensor]) -> Tensor:
        key = where["key"]
        if key not in self._memory:
            self._memory[key] = attach(where)
        self._used.add(key)
        return self._memory[key]

    def _apply_delta(self, where: Mapping[str, Any]) -> Tensor:
        name, flat = self._bases.pop(where["keep"], (None, torch.empty(0, dtype=torch.uint8)))
        if name != where["base"]:
            raise SyncError(
                f"the bucket of weights that starts with {where['keep']} arrived as a difference to version {where['base'][0]}, which "
                "this engine does not have: it was restarted, or missed a sync"
            )
        delta.apply(flat, where["data"])
        return flat

    def _receive_broadcast(self, where: Mapping[str, Any], nbytes: int, gpu: int) -> Tensor:
        if where["key"] not in self._groups:
            self._groups[where["key"]] = Broadcast.join(where, gpu)
        try:
            return self._groups[where["key"]].receive(nbytes, where["turn"], where["times"])
        except SyncError:
            self._groups.pop(where["key"]).close()
            raise


def _file(where: Mapping[str, Any]) -> Tensor:
    try:
        descriptor = os.open(where["path"], os.O_RDWR)
    except OSError as error:
        raise SyncError(
            f"the engine's process cannot open {where['path']}, which contains the trainer's weights ({error.strerror}): the two "
            "processes are on different hosts, or do not share /dev/shm"
        ) from error
    try:
        # Map all pages at once: individual page faults take longer than reading them.
        memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _data(where: Mapping[str, Any]) -> Tensor:
    data = bytearray(where["data"])  # torch requires writable memory
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class Arrival(ABC):
    """Interface of an engine for one version that arrives in buckets."""

    @abstractmethod
    async def take(self, units: Iterator[Encoded]) -> None:
        """Load some of the version's tensors. Their memory is reused after this returns, except that of ``lasting`` tensors, which
        remains valid until another version is served. Reading all units raises SyncError if the bytes differ from those sent; what was
        loaded is invalid then."""

    @abstractmethod
    async def finish(self) -> None:
        """Serve this version; all tensors have arrived. Raises if the version is incomplete."""


@dataclass
class _Progress:
    """Progress of a version: its arrival, buckets per rank, ranks whose tensors were loaded, and ranks that are done."""

    version: int
    push: int | None
    arrival: Arrival
    counts: dict[int, int] = field(default_factory=dict)
    loaded: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


class Arrivals:
    """Implements an engine's ``receive`` for the transport ``buckets``.

    ``sender`` of a message is (rank, ranks): an update is complete after the last bucket of every rank. ``number`` is the index of the
    bucket on its rank; 0 restarts the rank's part. That has no effect on other ranks if none of its tensors was loaded: a rank tries
    several kinds of memory with empty buckets before its first tensor, and some of them may fail while other ranks already send.
    ``push`` is the index of the push, if present: buckets of two pushes of a version are
    never combined. ``staged`` buckets belong to a version that is stored in addition to the served one until a ``switch`` message.
    Memory of a message marked ``once`` is detached immediately, because the sender frees it.

    Args:
        begin: (version, staged) -> ``Arrival``. An arrival that is not staged may overwrite the served weights; the engine must not
            answer requests until it is finished.
    """

    def __init__(self, begin: Callable[[int, bool], Arrival]) -> None:
        self._begin = begin
        self._inbox = Inbox()
        self._open: dict[bool, _Progress] = {}
        self._served: int | None = None
        self._turn = asyncio.Lock()

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        """Process a message, see ``Engine.receive``. The engine handles requests in flight.

        Raises:
            SyncError: a bucket is corrupt, missing, or in memory that this process cannot access. All progress of its version is dropped,
                unless no tensor of the bucket's rank was loaded.
        """
        message = await self._inbox.fetch(message)  # messages of several ranks are fetched concurrently
        async with self._turn:
            if message.get("switch"):
                await self._switch(version)
                return
            staged = bool(message.get("staged"))
            before = self._open.pop(staged, None)
            self._open = {}  # any other version will not be completed
            rank, ranks = message["sender"]
            progress, taken = self._continue(before, message, version), False
            try:
                await self._take_bucket(progress, message, last)
                taken = True
                if len(progress.done) < ranks:
                    self._open[staged] = progress
                    return
                self._inbox.finish()
                if staged:
                    self._open[staged] = progress
                else:
                    await self._serve(progress)
            except BaseException as error:
                if isinstance(error, SyncError) and not taken and progress.counts and rank not in progress.loaded:
                    self._open[staged] = progress  # the other ranks continue
                else:
                    self._inbox.forget()
                raise

    def drop(self) -> None:
        """Drop the versions that are still incomplete."""
        self._open = {}

    def forget(self) -> None:
        """Drop incomplete versions and stored bases, after the weights were loaded in another way."""
        self.drop()
        self._inbox.forget()

    def _continue(self, progress: _Progress | None, message: Mapping[str, Any], version: int) -> _Progress:
        """Return the progress of a message's version: ``progress``, or a new one."""
        (rank, _), sent = message["sender"], (version, message.get("push"))
        restarts = message["number"] == 0 and progress is not None and rank in progress.loaded
        if progress is None or (progress.version, progress.push) != sent or restarts:
            return _Progress(*sent, self._begin(version, bool(message.get("staged"))))
        if message["number"] == 0:
            progress.counts.pop(rank, None)
            progress.done.discard(rank)
        return progress

    async def _take_bucket(self, progress: _Progress, message: Mapping[str, Any], last: bool) -> None:
        """Load a bucket."""
        (rank, _), number = message["sender"], message["number"]
        expected = progress.counts.get(rank, 0)
        if number != expected:
            raise SyncError(
                f"bucket {number} of version {progress.version} arrived, but bucket {expected} was expected: a message was lost, or the "
                "engine was restarted"
            )

        def mark_loaded() -> Iterator[Encoded]:
            for unit in self._inbox.open(message):
                progress.loaded.add(rank)
                yield unit

        units = mark_loaded()
        await progress.arrival.take(units)
        for _ in units:  # read to the end, where the checksum is verified
            pass
        if message.get("once"):
            self._inbox.detach()
        progress.counts[rank] = number + 1
        if last:
            progress.done.add(rank)

    async def _switch(self, version: int) -> None:
        """Serve the staged version; every rank sends this message."""
        progress = self._open.pop(True, None)
        if progress is not None and progress.version == version:
            await self._serve(progress)
        elif self._served != version:
            raise SyncError(f"version {version} was not staged in this engine: it was restarted")

    async def _serve(self, progress: _Progress) -> None:
        await progress.arrival.finish()
        self._served = progress.version
