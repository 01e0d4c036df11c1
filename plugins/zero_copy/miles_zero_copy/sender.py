"""Filling one bucket while the other is read, and lending what need not be packed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from miles_core.data import Encoded
from miles_core.format import Stored
from miles_core.plugin import SyncError
from miles_transport import BLOCK, Loan, room_of, rounded
from miles_zero_copy.paths import Path
from miles_zero_copy.slots import Receive, Slot, StandingSlot
from miles_zero_copy.versions import Versions

log = logging.getLogger(__name__)

#: Bytes of a slot before it is known that they do not do.
FIRST = 16 << 20

#: In how many buckets a version is sent that stays, and the least bytes of one: the engine checks one while the next is filled, so only
#: the time for the last one is added to that of the trainer.
PIECES, PIECE = 16, 64 << 20

#: How often the bucket is sent that measures a way.
PROBES = 3
#: Bytes from which on a tensor is rather read where it lies than packed.
LENT = 1 << 20
#: How many of them are lent in one message: the engine finds their places while the next ones are found here. For fewer, two processes
#: would only take the GPU from each other.
LOANS = 1024


@dataclass
class Sent:
    """What was sent of one version.

    Attributes:
        nbytes: of its tensors.
        travelled: bytes that were moved to the engine: in messages and broadcasts all that was sent, padding included; in shared
            memory and by handle the tensors alone.
        encoded: whether any tensor was in a number format.
        tensors, buckets: how many.
    """

    nbytes: int = 0
    travelled: int = 0
    encoded: bool = False
    tensors: int = 0
    buckets: int = 0


class Sender:
    """Sends streams of tensors through two slots, which are filled again once the engine has acknowledged what was in them.

    Args:
        path: makes the slots.
        nbytes: bytes of a slot, at most; they are made smaller until more is to be sent, and larger for a tensor that needs it.
        sender: this rank, and of how many.
        stay: engines read plain weights where they arrive, in memory for two whole versions, from the second version on:
            then it is known how much one takes.

    Attributes:
        full: there was no memory for a bucket that was needed.
    """

    def __init__(self, path: Path, nbytes: int, sender: tuple[int, int], stay: bool = False) -> None:
        self.path, self._sender = path, sender
        self._given = rounded(nbytes)
        self._enough = min(self._given, rounded(path.enough))
        self._wanted = min(self._given, self._enough * 5 // 4)  # so that what is nearly full takes one more
        self._slots: list[Slot] = []
        self._make_slots(min(self._wanted, FIRST))
        self._versions = Versions() if stay and path.stays else None
        self._standing: StandingSlot | None = None
        self._taken = self._piece = 0
        self._packed = 0  # bytes of the tensors in the bucket that is being filled
        self._reading: list[asyncio.Task[float]] = []
        self._loan = Loan()
        self._loans: list[Loan] = []  # those under way keep their tensors alive
        self.sent = Sent()
        self.full = False

    @property
    def _slot(self) -> Slot:
        """The one that is being filled."""
        return self._standing or self._slots[0]

    def room(self, name: str, stored: Mapping[str, Stored]) -> dict[str, Tensor] | None:
        """Where a weight's codes may be written: into the bucket they will be sent in."""
        return self._slot.bucket.room(name, stored)

    async def greet(self, receive: Receive, version: int) -> None:
        """Begin a version with a bucket that holds no tensors. SyncError where the engine cannot read the slots."""
        self.sent = Sent()
        for slot in self._slots:
            slot.bucket.clear()
        await self._send_noise(BLOCK, receive, version)

    async def speed(self, receive: Receive, version: int) -> float:
        """Bytes a second of this way, from buckets that hold no tensors: the best of a few."""
        have, nbytes = len(self._slot.bucket.buffer), min(self.path.probe, self._given)
        if have < nbytes:
            try:
                self._make_slots(nbytes)
            except SyncError:  # no memory for it: a smaller one shows it too
                self._make_slots(nbytes := have)
        return max([nbytes / await self._send_noise(nbytes, receive, version) for _ in range(PROBES)])

    async def send(self, units: Iterator[Encoded], receive: Receive, version: int) -> Sent:
        """Send all of ``units`` after a greeting, or as the beginning of a version; returns when the engine has them."""
        self._slots[0].bucket.clear()
        if self._versions is not None:
            self._standing = self._versions.begin(self._taken)
            self._piece = min(max(self._taken // PIECES, PIECE), self._given)
        try:
            self._taken = 0
            for unit in units:
                await self._add(unit, receive, version)
            if self._slot.bucket.units or not self._loan:
                await self._deliver(receive, version, last=not self._loan)
            if self._loan:
                await self._lend(receive, last=True)
            await self._acknowledged()
        finally:
            self._standing = None
            if self._reading:  # after an error: nobody reads a slot, or what was lent, that may be freed
                await asyncio.wait(self._reading)
                self._reading = []
            self._loans, self._loan = [], Loan()
        sent, self.sent = self.sent, Sent()
        if sent.encoded:  # engines hold these as numbers of their own
            self._taken = 0
        return sent

    def in_force(self) -> None:
        """What was sent last is what engines serve now."""
        if self._versions is not None:
            self._versions.in_force()

    def close(self) -> None:
        """Free the slots."""
        self._free_slots()
        if self._versions is not None:
            self._versions.close()
        self.path.close()

    async def _send_noise(self, nbytes: int, receive: Receive, version: int) -> float:
        self._slot.bucket.fill(nbytes)
        await self._deliver(receive, version)
        self._taken = 0  # of no version
        return await self._acknowledged()

    async def _add(self, unit: Encoded, receive: Receive, version: int) -> None:
        nbytes = unit.nbytes
        if len(self._loan) == LOANS:
            await self._lend(receive)
        if self._lent(unit, nbytes):
            pass
        elif not self._slot.bucket.add(unit):
            if self._slot.bucket.units:
                await self._deliver(receive, version)
            self._standing = None  # more came than the last time: engines copy the rest
            await self._grow(unit)
            self._slot.bucket.add(unit)
            self._packed += nbytes
        else:
            self._packed += nbytes
        self.sent.tensors += len(unit.parts)
        self.sent.nbytes += nbytes
        self.sent.encoded |= bool(unit.format)
        bucket = self._slot.bucket
        if bucket.end >= (self._piece if self._standing else self._enough) and not bucket.awaits:
            await self._deliver(receive, version)

    def _lent(self, unit: Encoded, nbytes: int) -> bool:
        """Whether the engine is to read a tensor where the trainer has it."""
        if not self.path.lends or not unit.lasting or unit.format or nbytes < LENT:
            return False
        return self._loan.add(unit.name, unit.parts[unit.name])

    async def _lend(self, receive: Receive, last: bool = False) -> None:
        """Send the message about what is to be read where it lies."""
        message = self._loan.message()
        self.sent.travelled += message["nbytes"]
        await self._post(self._slot, message, receive, last)
        self._loans.append(self._loan)
        self._loan = Loan()

    async def _grow(self, unit: Encoded) -> None:
        """Room for a tensor, and for the next ones."""
        needed = rounded(room_of(unit))
        if needed > self._given:
            log.warning(
                "--sync-bucket-size %d is smaller than %s (%d bytes): buckets are made that large",
                self._given,
                unit.name,
                needed,
            )
            self._given = needed
        self._wanted = max(self._wanted, needed)
        have = len(self._slot.bucket.buffer)
        if have == self._wanted:
            return
        await self._acknowledged()
        try:
            self._make_slots(self._wanted)
        except SyncError:
            if needed > have:
                self.full = True
                raise
            self._make_slots(have)  # there is no memory for larger ones
            self._wanted = have

    async def _deliver(self, receive: Receive, version: int, last: bool = False) -> None:
        """Send the bucket on its way, and go on with the other once it was read."""
        slot = self._slot
        header = slot.bucket.header()
        memory, packed, self._packed = slot.memory(header, version), self._packed, 0
        if header["units"]:  # otherwise it only shows that the engine can be reached
            self.sent.travelled += slot.travels(header, memory, packed)
        await self._post(slot, {**header, "memory": memory}, receive, last)
        self._taken += rounded(slot.bucket.end)
        if self._standing is not None and self._versions is not None:
            self._standing = self._versions.after(self._standing)
            return
        self._slots.reverse()
        await self._slot.left()
        self._slot.bucket.clear()

    async def _post(self, slot: Slot, message: Mapping[str, Any], receive: Receive, last: bool = False) -> None:
        """Send a message once those before it were answered, or are few."""
        numbered = {**message, "number": self.sent.buckets, "sender": list(self._sender)}
        self.sent.buckets += 1
        await self._acknowledged(self.path.ahead)
        slot.reading = sending = asyncio.create_task(slot.deliver(receive, numbered, last))
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody's, after the first error
        self._reading.append(sending)
        await asyncio.sleep(0)  # the message leaves before the other slot is filled

    async def _acknowledged(self, ahead: int = 0) -> float:
        """All buckets that are on their way were read, but for the last ones; the seconds that the last of them took."""
        seconds = 0.0
        while len(self._reading) > ahead:
            seconds = await self._reading[0]
            del self._reading[0]
        return seconds

    def _make_slots(self, nbytes: int) -> None:
        self._free_slots()
        try:
            for _ in range(2):
                self._slots.append(self.path.make(nbytes))
        except BaseException:
            self._free_slots()
            raise

    def _free_slots(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots = []
