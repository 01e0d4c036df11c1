"""Versions on their way into an engine, bucket by bucket: which came, of which rank, and when a version is whole."""

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
    """One version on its way into an engine: what the engine does with it."""

    @abstractmethod
    async def take(self, units: Iterator[Encoded]) -> None:
        """Some of its tensors, whose memory is written over when this has returned; ``lasting`` ones stay until another version is in
        force. Reading them to the end raises SyncError where they are not what was sent: what was taken is of no use then."""

    @abstractmethod
    async def finish(self) -> None:
        """All of them came, and this version is to be in force: serve it. Raises when it is not complete."""


@dataclass
class _Counted:
    version: int
    push: int | None
    arrival: Arrival
    counts: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


class Arrivals:
    """An engine's ``receive``, for the transport ``buckets``: give it every message, and it says what to do.

    ``sender`` of a message is (rank, ranks): an update is complete with the last bucket of every rank; ``number`` counts a rank's
    buckets, and 0 begins its part anew. ``push`` is the number of the push, where there is one: buckets of two pushes of one version are
    never combined. Buckets that are ``staged`` belong to a version that is held beside the one in force
    until a message says ``switch``. Memory of a message that is for ``once`` is not kept attached: the sender gives it back.

    Args:
        begin: makes an ``Arrival``, from its version and whether it is staged. One that is not may write over the weights in
            force, which answer nothing until it is finished.
    """

    def __init__(self, begin: Callable[[int, bool], Arrival]) -> None:
        self._begin = begin
        self._inbox = Inbox()
        self._open: dict[bool, _Counted] = {}
        self._served: int | None = None
        self._turn = asyncio.Lock()

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        """As ``Engine.receive``; requests in flight are the engine's business.

        Raises:
            SyncError: a bucket is not what was sent, or did not come. Nothing is left of its version then.
        """
        message = await self._inbox.fetched(message)  # those of several ranks beside each other
        async with self._turn:
            if message.get("switch"):
                await self._switch(version)
                return
            staged = bool(message.get("staged"))
            counted = self._open.pop(staged, None)
            self._open = {}  # what else is on its way will not be completed
            try:
                counted = await self._counted(counted, message, version, last)
                if len(counted.done) < message["sender"][1]:
                    self._open[staged] = counted
                    return
                self._inbox.finish()
                if staged:
                    self._open[staged] = counted
                else:
                    await self._serve(counted)
            except BaseException:
                self._inbox.forget()
                raise

    def drop(self) -> None:
        """What arrived so far will not be completed."""
        self._open = {}

    def forget(self) -> None:
        """The weights came in another way: nothing that arrived, or was kept to compare with, is of use."""
        self.drop()
        self._inbox.forget()

    async def _counted(
        self, counted: _Counted | None, message: Mapping[str, Any], version: int, last: bool
    ) -> _Counted:
        """The version that a bucket belongs to, with what is in it."""
        (rank, _), number = message["sender"], message["number"]
        sent = version, message.get("push")
        if counted is None or (counted.version, counted.push) != sent or (number == 0 and rank in counted.counts):
            counted = _Counted(*sent, self._begin(version, bool(message.get("staged"))))
        expected = counted.counts.get(rank, 0)
        if number != expected:
            raise SyncError(
                f"bucket {number} of version {version} came to an engine that has {expected} of them: a message was lost, or the "
                "engine was started anew"
            )
        units = self._inbox.open(message)
        await counted.arrival.take(units)
        for _ in units:  # to the end, where the checksum is
            pass
        if message.get("once"):
            self._inbox.detach()
        counted.counts[rank] = number + 1
        if last:
            counted.done.add(rank)
        return counted

    async def _switch(self, version: int) -> None:
        """Put the staged version in force; every rank says so."""
        counted = self._open.pop(True, None)
        if counted is not None and counted.version == version:
            await self._serve(counted)
        elif self._served != version:
            raise SyncError(f"version {version} was not staged in this engine: it was started anew")

    async def _serve(self, counted: _Counted) -> None:
        await counted.arrival.finish()
        self._served = counted.version
