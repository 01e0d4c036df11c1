"""Static steps that are launched before the host has read the results of the previous step.

A step reads and writes device buffers (``StaticBatch``), so the GPU keeps working while the host appends tokens, checks stop conditions and
answers requests. When rows leave, the others continue in their new slots. When rows join, the step in flight remains valid for the earlier
rows; the host fills the batch of the following step.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from miles_core.errors import NonFiniteError, first_line
from miles_embedded.engine.graphs import Graphs, check_gap
from miles_embedded.engine.row import Row, slots_of
from miles_embedded.engine.sampling import Sampled
from miles_embedded.engine.static_attention import CannotBeStatic
from miles_embedded.engine.static_batch import StaticBatch
from miles_embedded.engine.step import Emitted, StepEngine

log = logging.getLogger(__name__)

#: New tokens per row to reserve cache room for at once. Rarer growth means fewer recordings of the graphs.
_ROOM = 512


class StepShape(Protocol):
    """Properties that require a separate recording of a step. Hashable.

    Attributes:
        rows: rows of the batch, padding included.
        appended: tokens that the step appends to the cache of a row, at most.
        reach: columns after the cached tokens of a row that the step writes, at most.
    """

    @property
    def rows(self) -> int: ...

    @property
    def appended(self) -> int: ...

    @property
    def reach(self) -> int: ...

    def __hash__(self) -> int: ...


S = TypeVar("S", bound=StepShape)


@dataclass
class Launched(Generic[S]):
    """A step in flight.

    Attributes:
        rows: number of rows of the batch.
        shape: which variant of the step runs.
        results: host buffer for the batch's results; valid once ``event`` has passed.
        event: end of the copy to the host; None without a GPU.
        places: [slots] index in the batch of the row that is now in each slot, -1 for one that left. Rows in further slots joined later.
    """

    rows: int
    shape: S
    results: Tensor
    event: torch.cuda.Event | None
    places: np.ndarray

    def wait(self) -> Tensor:
        """Wait for the results of the rows, [..., rows]."""
        if self.event is not None:
            self.event.synchronize()
        return self.results[:, : self.rows]

    @property
    def occupied(self) -> bool:
        """Whether any row of the batch is still running."""
        return int(self.places.max(initial=-1)) >= 0

    def find(self, count: int) -> np.ndarray:
        """Return the index in the batch of each of the first ``count`` rows, -1 for those that joined after the launch."""
        if count <= len(self.places):
            return self.places[:count]
        return np.concatenate([self.places, np.full(count - len(self.places), -1)])

    def covers(self, count: int) -> bool:
        """Whether the batch contains all of the first ``count`` rows."""
        return len(self.places) >= count and int(self.places[:count].min(initial=0)) >= 0

    def leave(self, slots: np.ndarray) -> None:
        """Drop the rows in these slots."""
        self.places[slots[slots < len(self.places)]] = -1

    def move(self, where: np.ndarray, sources: np.ndarray, count: int) -> None:
        """Move rows from slots ``sources`` to ``where``; ``count`` rows remain."""
        self.places = self.find(max(len(self.places), int(sources.max(initial=-1)) + 1))
        self.places[where] = self.places[sources]
        self.places = self.places[:count]


class AsyncScheduling(ABC, Generic[S]):
    """Static steps of ``engine``'s model.

    Args:
        engine: the engine.
        used: whether static steps are enabled.
        batch: the rows in buffers.
        step: one step over ``batch``.

    Attributes:
        used: whether static steps are enabled; otherwise every step is a plain forward.
        refused: why they were disabled after the engine was configured to use them; "" otherwise.
    """

    def __init__(self, engine: StepEngine, used: bool, batch: Any, step: Callable[[S], Tensor]) -> None:
        self.engine, self.runner, self.used = engine, engine.runner, used
        self.batch: Any = batch
        self.graphs: Graphs[S] = Graphs(engine.runner, step, engine.weight_tensors)
        self._on_gpu = self.runner.device.type == "cuda"
        shape, dtype = batch.results.shape, batch.results.dtype
        self._hosts = [torch.zeros(shape, dtype=dtype, pin_memory=self._on_gpu) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._on_gpu else []
        self._pending: Launched[S] | None = None
        self._compared = False
        self.refused = ""

    @abstractmethod
    def step(self, rows: list[Row]) -> Emitted | Sampled | None:
        """Advance all running rows; None if the step has to run without static buffers."""

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows that left the cache from the step in flight."""
        if self._pending is not None:
            self._pending.leave(slots_of(rows))

    def apply_moves(self, where: np.ndarray, sources: np.ndarray) -> None:
        """Move the state of rows whose slots moved because other rows left."""
        if self._pending is not None:
            self._pending.move(where, sources, self.runner.cache.rows)
            self.batch.move(where, sources, self.runner.cache.rows)

    def settle(self) -> None:
        """Discard the step in flight; it will be computed again with the weights in place at that time."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self.runner.cache.own.lengths[np.flatnonzero(pending.places >= 0)] -= pending.shape.appended

    # -- for subclasses ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _fill(self, rows: list[Row]) -> None:
        """Copy the state of the rows to the batch."""

    @abstractmethod
    def _compare(self, rows: list[Row], shape: S) -> None:
        """Compute one step both ways, once per engine; raise CannotBeStatic if the results differ by more than rounding. The cache's
        lengths are the same afterwards."""

    def _make_ready(self, rows: list[Row], shape: S) -> bool:
        """Reserve cache room, record missing graphs and fill the batch. Returns False, after a warning, where that fails."""
        try:
            self._make_room(rows, shape)
            if not self._compared:
                self._compare(rows, shape)
                self._compared = True
            self._fill(rows)
            if not self.graphs.ready(shape):
                self.graphs.prepare(shape)
                self._fill(rows)
        except NonFiniteError:
            raise
        except (CannotBeStatic, RuntimeError) as error:  # recording fails with RuntimeErrors of many kinds
            self.used, self.refused = False, first_line(error)
            self.graphs.clear()
            log.warning(
                "%s decodes without CUDA graphs, which is slower: %s", type(self.engine.model).__name__, self.refused
            )
            return False
        return True

    def _make_room(self, rows: list[Row], shape: S) -> None:
        own = self.runner.cache.own
        length = int(own.lengths[: len(rows)].max())
        columns, now = self.engine.columns, slice(len(rows))
        left = int((columns.limits[now] - columns.lengths[now]).max())
        # room for the step in flight and the one after it
        own.reserve(max(shape.rows, own.size), max(length + 2 * shape.reach, min(length + left + shape.reach, _ROOM)))

    def _has_room(self, rows: Sequence[Row], shape: S) -> bool:
        """Whether the cache has room for a step of these rows."""
        own = self.runner.cache.own
        return int(own.lengths[: len(rows)].max()) + shape.reach <= own.width

    def _launch(self, rows: list[Row], shape: S) -> Launched[S]:
        """Run one step on the current batch and start copying its results to the host."""
        self.graphs.run(shape)
        self.runner.cache.own.lengths[: len(rows)] += shape.appended
        self._hosts.reverse()
        host = self._hosts[0]
        host.copy_(self.batch.results, non_blocking=True)
        event = None
        if self._on_gpu:
            self._events.reverse()
            event = self._events[0]
            event.record()
        return Launched(len(rows), shape, host, event, np.arange(len(rows)))

    def _check_gap(self, static: Tensor, plain: Tensor) -> None:
        """See ``graphs.check_gap``."""
        check_gap(self.engine.model, static, plain)


def fill_rows(batch: StaticBatch, engine: StepEngine, rows: Sequence[Row], *more: Sequence[int]) -> None:
    """Copy the state of ``rows``, the first running rows of ``engine``, to ``batch``; ``more``: values of its further integers."""
    cache, columns, now = engine.runner.cache, engine.columns, slice(len(rows))
    slots = cache.prefix_of[now]
    batch.fill(
        columns.last[now],
        cache.own.lengths[now],
        slots,
        cache.prefixes.lengths[slots],
        columns.keys[now],
        columns.temperatures[now],
        columns.variants[now],
        *more,
    )
