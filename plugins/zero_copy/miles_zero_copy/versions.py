"""Shared memory for two whole versions, in which engines read the weights they serve: one is in force while the next is written."""

from __future__ import annotations

import logging

from miles_transport import round_to_blocks
from miles_zero_copy import segment
from miles_zero_copy.segment import NoSegmentError, Segment
from miles_zero_copy.slots import StandingSlot

log = logging.getLogger(__name__)

#: What two versions may take of the memory that is free: the rest is for everybody else.
SHARE = 0.5


class Versions:
    """Two pieces of memory that take turns, each as large as a version.

    They may be freed at any time: who reads a version has mapped it, and keeps it until it has another.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        self._halves: list[Segment] = []

    def begin(self, nbytes: int) -> StandingSlot | None:
        """Where a version of so many bytes begins, in the piece that is not in force; None where there is no memory for it."""
        if nbytes != self._nbytes:
            self.close()
            self._nbytes, self._halves = nbytes, _pair(nbytes)
        return StandingSlot(self._halves[0]) if self._halves else None

    def after(self, slot: StandingSlot) -> StandingSlot:
        """What is behind a slot that was filled."""
        return StandingSlot(self._halves[0], slot.start + round_to_blocks(slot.bucket.end))

    def in_force(self) -> None:
        """The version that was written is the one that is read now."""
        self._halves.reverse()

    def close(self) -> None:
        """Free both."""
        for half in self._halves:
            half.close()
        self._nbytes, self._halves = 0, []


def _pair(nbytes: int) -> list[Segment]:
    """Memory for two versions, or none."""
    if not nbytes:
        return []
    free = segment.free_bytes()
    if 2 * nbytes > SHARE * free:
        log.info(
            "engines copy the weights out of shared memory: two versions of %d bytes to read them in are more than half of the %d "
            "bytes that are free",
            nbytes,
            free,
        )
        return []
    made: list[Segment] = []
    try:
        for _ in range(2):
            made.append(Segment(nbytes))
    except NoSegmentError as error:
        for half in made:
            half.close()
        log.warning("engines copy the weights out of shared memory: no room for two versions, %s", error.__cause__)
        return []
    log.info("engines read the weights where they are: two versions of %d bytes in shared memory", nbytes)
    return made
