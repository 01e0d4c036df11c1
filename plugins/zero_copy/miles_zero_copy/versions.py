"""Shared memory for two whole versions: engines read the weights they serve from one half while the next version is written to the other."""

from __future__ import annotations

import logging

from miles_workers.transport import round_to_blocks
from miles_zero_copy import segment
from miles_zero_copy.segment import NoSegmentError, Segment
from miles_zero_copy.slots import StandingSlot

log = logging.getLogger(__name__)

#: Maximum share of the free memory for two versions.
SHARE = 0.5


class Versions:
    """Two segments that alternate, each as large as a version.

    They may be freed at any time, because engines map the version they read and keep the mapping until the next one.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        self._halves: list[Segment] = []

    def begin(self, nbytes: int) -> StandingSlot | None:
        """Return the first slot for a version of ``nbytes`` bytes, in the half that is not served; None without enough memory."""
        if nbytes != self._nbytes:
            self.close()
            self._nbytes, self._halves = nbytes, _allocate_pair(nbytes)
        return StandingSlot(self._halves[0]) if self._halves else None

    def after(self, slot: StandingSlot) -> StandingSlot:
        """Return the slot that follows ``slot``, which is filled, in the same half."""
        return StandingSlot(self._halves[0], slot.start + round_to_blocks(slot.bucket.end))

    def in_force(self) -> None:
        """Swap the halves: the version that was written is now served."""
        self._halves.reverse()

    def close(self) -> None:
        """Free both segments."""
        for half in self._halves:
            half.close()
        self._nbytes, self._halves = 0, []


def _allocate_pair(nbytes: int) -> list[Segment]:
    """Allocate memory for two versions; returns an empty list if there is not enough."""
    if not nbytes:
        return []
    free = segment.free_bytes()
    if 2 * nbytes > SHARE * free:
        log.info(
            "engines copy the weights out of shared memory: two versions of %d bytes would need more than half of the %d free bytes",
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
        log.warning("engines copy the weights out of shared memory: not enough for two versions, %s", error.__cause__)
        return []
    log.info("engines read the weights in place: two versions of %d bytes in shared memory", nbytes)
    return made
