"""Receive weight updates bucket by bucket: track the buckets of every rank and finish complete versions."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_core.data.unit import Encoded
from miles_core.errors import SyncError
from miles_transport.inbox import Inbox


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
    """Progress of a version: its arrival, buckets per rank, and ranks that are done."""

    version: int
    push: int | None
    arrival: Arrival
    counts: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


class Arrivals:
    """Implements an engine's ``receive`` for the transport ``buckets``.

    ``sender`` of a message is (rank, ranks): an update is complete after the last bucket of every rank. ``number`` is the index of the
    bucket on its rank; 0 restarts the rank's part. ``push`` is the index of the push, if present: buckets of two pushes of a version are
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
            SyncError: a bucket is corrupt or missing. All progress of its version is dropped then.
        """
        message = await self._inbox.fetch(message)  # messages of several ranks are fetched concurrently
        async with self._turn:
            if message.get("switch"):
                await self._switch(version)
                return
            staged = bool(message.get("staged"))
            progress = self._open.pop(staged, None)
            self._open = {}  # any other version will not be completed
            try:
                progress = await self._take_bucket(progress, message, version, last)
                if len(progress.done) < message["sender"][1]:
                    self._open[staged] = progress
                    return
                self._inbox.finish()
                if staged:
                    self._open[staged] = progress
                else:
                    await self._serve(progress)
            except BaseException:
                self._inbox.forget()
                raise

    def drop(self) -> None:
        """Drop the versions that are still incomplete."""
        self._open = {}

    def forget(self) -> None:
        """Drop incomplete versions and stored bases, after the weights were loaded in another way."""
        self.drop()
        self._inbox.forget()

    async def _take_bucket(
        self, progress: _Progress | None, message: Mapping[str, Any], version: int, last: bool
    ) -> _Progress:
        """Load a bucket; returns the progress of its version."""
        (rank, _), number = message["sender"], message["number"]
        sent = version, message.get("push")
        if progress is None or (progress.version, progress.push) != sent or (number == 0 and rank in progress.counts):
            progress = _Progress(*sent, self._begin(version, bool(message.get("staged"))))
        expected = progress.counts.get(rank, 0)
        if number != expected:
            raise SyncError(
                f"bucket {number} of version {version} arrived, but bucket {expected} was expected: a message was lost, or the engine was "
                "restarted"
            )
        units = self._inbox.open(message)
        await progress.arrival.take(units)
        for _ in units:  # read to the end, where the checksum is verified
            pass
        if message.get("once"):
            self._inbox.detach()
        progress.counts[rank] = number + 1
        if last:
            progress.done.add(rank)
        return progress

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
