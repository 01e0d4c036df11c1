"""Static steps as CUDA graphs: recorded on first use and replayed until an address they contain changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from miles_embedded.engine.cache import Cache
from miles_embedded.engine.runner import Runner
from miles_embedded.engine.static_attention import CannotBeStatic

S = TypeVar("S", bound=Hashable)

#: Largest mean |difference| between the log-probabilities of a static and a plain step that rounding explains, in nats.
TOLERANCE = {torch.float32: 5e-3, torch.float64: 5e-3}
TOLERANCE_LOW = 0.3


class Graphs(Generic[S]):
    """Run static steps; on a GPU by replaying CUDA graphs.

    A graph contains the addresses of the weights, of the cache's slabs and of the batch. The batch never moves. When a slab moves, or
    an update moves weights, all graphs are dropped and recorded again on their next use.

    Args:
        runner: the model and its cache.
        step: runs the step of a shape and returns logits.
        weights: returns the tensors whose addresses the graphs contain.
        generation: changes when a slab of the cache that the step accesses moves; by default that of all slabs.
    """

    def __init__(
        self,
        runner: Runner,
        step: Callable[[S], Tensor],
        weights: Callable[[], Iterable[Tensor]],
        generation: Callable[[Cache], Hashable] = lambda cache: (cache.prefixes.generation, cache.own.generation),
    ) -> None:
        self.runner, self.step, self.weights, self._generation = runner, step, weights, generation
        self.records = runner.device.type == "cuda"
        self._recorded: dict[S, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._cache: tuple[weakref.ref[Cache], Hashable] | None = None
        self._weights: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Number of recorded graphs."""
        return len(self._recorded)

    def ready(self, shape: S) -> bool:
        """Whether ``run`` needs no recording. Recording runs the step and advances the batch, so fill the batch again afterwards."""
        return not self.records or (self.current and shape in self._recorded)

    def prepare(self, shape: S) -> None:
        """Record a step that is not ready, with the current content of its batch."""
        if self.ready(shape):
            return
        if not self.current:
            self.clear()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Allocates slabs, loads kernels and compiles Triton kernels, none of which may happen while recording.
            self.step(shape)
        torch.cuda.current_stream().wait_stream(side)
        if not self.current:  # new slabs
            self.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            logits = self.step(shape)
        self._recorded[shape] = graph, logits

    def run(self, shape: S) -> Tensor:
        """Run one step; returns its logits, which the next step may overwrite."""
        if not self.records:
            return self.step(shape)
        graph, logits = self._recorded[shape]
        graph.replay()
        return logits

    def weights_changed(self) -> None:
        """Drop the graphs if an update moved any weight."""
        if self._recorded and self._addresses() != self._weights:
            self.clear()

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._recorded.clear()
        cache = self.runner.cache
        self._weights = self._addresses() if self.records else ()
        self._cache = weakref.ref(cache), self._generation(cache)
        if self.records:
            self._pool = torch.cuda.graph_pool_handle()

    @property
    def current(self) -> bool:
        """Whether the cache is where it was when the graphs were last cleared."""
        cache = self.runner.cache
        return self._cache is not None and self._cache[0]() is cache and self._cache[1] == self._generation(cache)

    def _addresses(self) -> tuple[int, ...]:
        return tuple(t.data_ptr() for t in self.weights())


def check_gap(model: nn.Module, static: Tensor, plain: Tensor) -> None:
    """Compare the logits [n, vocab] of a static and a plain step.

    Raises:
        CannotBeStatic: they differ by more than rounding.
    """
    gap = float((static.float().log_softmax(-1) - plain.float().log_softmax(-1)).abs().mean())
    allowed = TOLERANCE.get(next(model.parameters()).dtype, TOLERANCE_LOW)
    if not gap <= allowed and plain.isfinite().all():
        raise CannotBeStatic(f"a step in static buffers differs from a plain one by {gap:.2g} nats a token")
