"""Filling one bucket while the other is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from miles_core.backend import BLOCK, Encoded, room_of, rounded
from miles_core.format import Stored
from miles_zero_copy.paths import Slot

log = logging.getLogger(__name__)

#: Bytes of a slot before it is known that they do not do.
FIRST = 16 << 20

#: Tells the engine to receive a message, the last one or not.
Receive = Callable[[Mapping[str, Any], bool], Awaitable[None]]


@dataclass
class Sent:
    """What was sent of one version."""

    nbytes: int = 0
    tensors: int = 0
    buckets: int = 0


class Sender:
    """Sends streams of tensors through two slots, which are filled again once the engine has acknowledged what was in them.

    Args:
        make: makes a slot of so many bytes.
        nbytes: bytes of a slot; they are made smaller until more is to be sent, and larger for a tensor that needs it.
        sender: this rank, and of how many.
    """

    def __init__(self, make: Callable[[int], Slot], nbytes: int, sender: tuple[int, int]) -> None:
        self._make, self._sender = make, sender
        self._wanted = rounded(nbytes)
        self._slots: list[Slot] = []
        self._make_slots(min(self._wanted, FIRST))
        self._reading: asyncio.Task[None] | None = None
        self.sent = Sent()

    @property
    def _slot(self) -> Slot:
        """The one that is being filled."""
        return self._slots[0]

    def room(self, name: str, stored: Mapping[str, Stored]) -> dict[str, Tensor] | None:
        """Where a weight's codes may be written: into the bucket they will be sent in."""
        return self._slot.bucket.room(name, stored)

    async def greet(self, receive: Receive) -> None:
        """Begin a version with a bucket that holds no tensors. SyncError where the engine cannot read the slots."""
        self.sent = Sent()
        for slot in self._slots:
            slot.bucket.clear()
        bucket = self._slot.bucket
        bucket.end = BLOCK
        bucket.filled.random_()
        await self._deliver(receive)
        await self._acknowledged()

    async def send(self, units: Iterator[Encoded], receive: Receive) -> Sent:
        """Send all of ``units`` after a greeting, or as the beginning of a version; returns when the engine has them."""
        self._slot.bucket.clear()
        try:
            for unit in units:
                await self._add(unit, receive)
            await self._deliver(receive, last=True)
            await self._acknowledged()
        finally:
            if self._reading is not None:  # after an error: nobody reads a slot that may be freed
                await asyncio.wait([self._reading])
                self._reading = None
        sent, self.sent = self.sent, Sent()
        return sent

    def close(self) -> None:
        """Free the slots."""
        for slot in self._slots:
            slot.close()
        self._slots = []

    async def _add(self, unit: Encoded, receive: Receive) -> None:
        if not self._slot.bucket.add(unit):
            await self._deliver(receive)
            needed = rounded(room_of(unit))
            if needed > self._wanted:
                log.warning(
                    "--sync-bucket-size %d is smaller than %s (%d bytes): buckets are made that large",
                    self._wanted,
                    unit.name,
                    needed,
                )
                self._wanted = needed
            if len(self._slot.bucket.buffer) < self._wanted:
                await self._acknowledged()
                self.close()
                self._make_slots(self._wanted)
            self._slot.bucket.add(unit)
        self.sent.tensors += len(unit.parts)
        self.sent.nbytes += unit.nbytes

    async def _deliver(self, receive: Receive, last: bool = False) -> None:
        """Send the bucket on its way, and go on with the other once it was read."""
        slot = self._slot
        message = {
            **slot.bucket.header(),
            "memory": slot.memory(),
            "number": self.sent.buckets,
            "sender": list(self._sender),
        }
        self.sent.buckets += 1
        await self._acknowledged()
        self._reading = asyncio.create_task(_told(receive, message, last))
        await asyncio.sleep(0)  # the message leaves before the other slot is filled
        self._slots.reverse()
        self._slot.bucket.clear()

    async def _acknowledged(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            await reading

    def _make_slots(self, nbytes: int) -> None:
        try:
            for _ in range(2):
                self._slots.append(self._make(nbytes))
        except BaseException:
            self.close()
            raise


async def _told(receive: Receive, message: dict[str, Any], last: bool) -> None:
    await receive(message, last)
