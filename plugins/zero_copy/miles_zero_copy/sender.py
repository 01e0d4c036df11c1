"""Sends weights in buckets: fills one bucket while the engine reads the other, and lends large tensors without packing them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from miles_core.data import Encoded
from miles_core.plugin import SyncError
from miles_formats import Stored
from miles_workers.transport import BLOCK, Loan, room_of, round_to_blocks
from miles_zero_copy.paths import Path
from miles_zero_copy.slots import Receive, Slot, StandingSlot
from miles_zero_copy.versions import Versions

log = logging.getLogger(__name__)

#: Initial bytes of a slot.
FIRST = 16 << 20

#: Number of buckets of a version that engines read in place, and minimum bytes of one: the engine checks a bucket while the next is filled,
#: so only the check of the last one adds to the total time.
PIECES, PIECE = 16, 64 << 20

#: Iterations of the event loop after which a message has left this process: it passes through several tasks of the runtime before.
STARTING = 4

#: Number of probe buckets that measure a path.
PROBES = 3
#: Minimum bytes of a tensor to be lent instead of packed.
LENT = 1 << 20
#: Number of tensors lent in one message: the engine looks up their destinations while this process prepares the next ones. With fewer, the
#: two processes would only compete for the GPU.
LOANS = 1024


@dataclass
class Sent:
    """Statistics of sending one version.

    Attributes:
        nbytes: bytes of its tensors.
        travelled: bytes moved to the engine: for messages and broadcasts including padding; for shared memory and handles the tensors
            only.
        encoded: whether any tensor was in a number format.
        tensors, buckets: number of tensors and buckets.
    """

    nbytes: int = 0
    travelled: int = 0
    encoded: bool = False
    tensors: int = 0
    buckets: int = 0


class Sender:
    """Sends streams of tensors through two slots. A slot is reused once the engine has acknowledged its contents.

    Args:
        path: allocates the slots.
        nbytes: maximum bytes of a slot; slots start smaller, and grow beyond it for a tensor that needs it.
        sender: this rank and the number of ranks.
        stay: from the second version on, when the size of a version is known, engines read unquantised weights in place, in memory for
            two whole versions.

    Attributes:
        full: a required bucket could not be allocated.
        sent: statistics of the current version.
    """

    def __init__(self, path: Path, nbytes: int, sender: tuple[int, int], stay: bool = False) -> None:
        self.path, self._sender = path, sender
        self._given = round_to_blocks(nbytes)
        self._enough = min(self._given, round_to_blocks(path.enough))
        self._wanted = min(
            self._given, self._enough * 5 // 4
        )  # so that a nearly full bucket still fits one more tensor
        self._slots: list[Slot] = []
        self._make_slots(min(self._wanted, FIRST))
        self._versions = Versions() if stay and path.stays else None
        self._standing: StandingSlot | None = None
        self._taken = self._piece = 0
        self._packed = 0  # bytes of the tensors in the bucket that is being filled
        self._reading: list[asyncio.Task[float]] = []
        self._loan = Loan()
        self._loans: list[Loan] = []  # keeps the tensors of loans in flight alive
        self.sent = Sent()
        self.full = False

    @property
    def _slot(self) -> Slot:
        """The slot that is being filled."""
        return self._standing or self._slots[0]

    def reserve(self, name: str, stored: Mapping[str, Stored]) -> dict[str, Tensor] | None:
        """Return destinations for a weight's codes in the current bucket, so that they need no copy; None if there is no room."""
        return self._slot.bucket.reserve(name, stored)

    async def greet(self, receive: Receive, version: int) -> None:
        """Begin a version with a bucket without tensors. Raises SyncError if the engine cannot read the slots."""
        self.sent = Sent()
        for slot in self._slots:
            slot.bucket.clear()
        await self._send_noise(BLOCK, receive, version)

    async def speed(self, receive: Receive, version: int) -> float:
        """Measure the path with buckets without tensors; returns the best of ``PROBES`` in bytes per second."""
        have, nbytes = len(self._slot.bucket.buffer), min(self.path.probe, self._given)
        if have < nbytes:
            try:
                self._make_slots(nbytes)
            except SyncError:  # not enough memory: measure with the current size
                self._make_slots(nbytes := have)
        return max([nbytes / await self._send_noise(nbytes, receive, version) for _ in range(PROBES)])

    async def send(self, units: Iterator[Encoded], receive: Receive, version: int) -> Sent:
        """Send all of ``units``, with or without a preceding ``greet``; returns when the engine has received them."""
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
            await self._wait_for_answers()
        finally:
            self._standing = None
            if (
                self._reading
            ):  # after an error: wait until the engine reads no slot or loan, because they may be freed now
                await asyncio.wait(self._reading)
                self._reading = []
            self._loans, self._loan = [], Loan()
        sent, self.sent = self.sent, Sent()
        if sent.encoded:  # engines convert encoded weights and cannot read them in place
            self._taken = 0
        return sent

    def in_force(self) -> None:
        """Mark the version sent last as the one that engines serve."""
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
        self._taken = 0  # the probe belongs to no version
        return await self._wait_for_answers()

    async def _add(self, unit: Encoded, receive: Receive, version: int) -> None:
        nbytes = unit.nbytes
        if len(self._loan) == LOANS:
            await self._lend(receive)
        if self._try_lend(unit, nbytes):
            pass
        elif not self._slot.bucket.add(unit):
            if self._slot.bucket.units:
                await self._deliver(receive, version)
            self._standing = None  # the version is larger than the last one: engines copy the rest
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

    def _try_lend(self, unit: Encoded, nbytes: int) -> bool:
        """Add a tensor to the current loan if the engine can read it from the trainer's memory; returns whether it was added."""
        if not self.path.lends or not unit.lasting or unit.format or nbytes < LENT:
            return False
        return self._loan.add(unit.name, unit.parts[unit.name])

    async def _lend(self, receive: Receive, last: bool = False) -> None:
        """Send the message about the current loan."""
        message = self._loan.message()
        self.sent.travelled += message["nbytes"]
        await self._post(self._slot, message, receive, last)
        self._loans.append(self._loan)
        self._loan = Loan()

    async def _grow(self, unit: Encoded) -> None:
        """Enlarge the slots for a tensor and for later ones."""
        needed = round_to_blocks(room_of(unit))
        if needed > self._given:
            log.warning(
                "--sync-bucket-size %d is smaller than %s (%d bytes): using buckets of that size",
                self._given,
                unit.name,
                needed,
            )
            self._given = needed
        self._wanted = max(self._wanted, needed)
        have = len(self._slot.bucket.buffer)
        if have == self._wanted:
            return
        await self._wait_for_answers()
        try:
            self._make_slots(self._wanted)
        except SyncError:
            if needed > have:
                self.full = True
                raise
            self._make_slots(have)  # not enough memory for larger slots
            self._wanted = have

    async def _deliver(self, receive: Receive, version: int, last: bool = False) -> None:
        """Send the current bucket, and switch to the other slot once it can be reused."""
        slot = self._slot
        header = slot.bucket.header()
        memory, packed, self._packed = slot.memory(header, version), self._packed, 0
        if header["units"]:  # a bucket without tensors is a probe
            self.sent.travelled += slot.travels(header, memory, packed)
        await self._post(slot, {**header, "memory": memory}, receive, last)
        self._taken += round_to_blocks(slot.bucket.end)
        if self._standing is not None and self._versions is not None:
            self._standing = self._versions.after(self._standing)
            return
        self._slots.reverse()
        await self._slot.left()
        self._slot.bucket.clear()

    async def _post(self, slot: Slot, message: Mapping[str, Any], receive: Receive, last: bool = False) -> None:
        """Send a message once at most ``path.ahead`` earlier messages are unanswered."""
        numbered = {**message, "number": self.sent.buckets, "sender": list(self._sender)}
        self.sent.buckets += 1
        await self._wait_for_answers(self.path.ahead)
        slot.reading = sending = asyncio.create_task(slot.deliver(receive, numbered, last))
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())  # later errors are not raised
        self._reading.append(sending)
        for _ in range(STARTING):  # start sending before the other slot is filled
            await asyncio.sleep(0)

    async def _wait_for_answers(self, ahead: int = 0) -> float:
        """Wait until at most ``ahead`` buckets are unanswered; returns the seconds of the last one waited for."""
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
