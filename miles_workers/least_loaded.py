"""Finds the worker with the fewest requests in flight among thousands."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection


class LeastLoaded:
    """Counts the requests in flight of each worker. A choice takes O(log n), where a search of all workers takes O(n).

    The heap holds one current entry per worker and outdated ones, which are dropped when they reach the top, or all together when they
    are too many.

    Attributes:
        load: requests in flight by worker, plus a fraction below 1 that decides between equal numbers.
    """

    def __init__(self) -> None:
        self.load: Counter[int] = Counter()
        self._heap: list[tuple[float, int]] = []
        self._among: Collection[int] = ()

    def add(self, number: int, change: float) -> None:
        """Change the requests in flight of a worker."""
        self.load[number] += change  # type: ignore[assignment]  # counters are annotated with whole numbers only
        if number in self._among:
            heapq.heappush(self._heap, (self.load[number], number))

    def choose(self, among: Collection[int]) -> int:
        """Return the worker of ``among`` (not empty) with the fewest requests; the lowest number of several.

        Between two calls workers may be removed from ``among``; a collection with added workers is another object.
        """
        if among is not self._among or len(self._heap) > 4 * len(among) + 64:
            self._among = among
            self._heap = [(self.load[number], number) for number in among]
            heapq.heapify(self._heap)
        while (top := self._heap[0])[1] not in among or top[0] != self.load[top[1]]:
            heapq.heappop(self._heap)
        return top[1]
