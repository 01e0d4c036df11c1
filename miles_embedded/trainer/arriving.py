"""Gradients of a backward pass on their way to FP32 sums."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Variable

#: Largest gradient, in elements, that waits for others, and elements that wait at most: enough for one launch to pay, and little memory.
_SMALL, _MOST = 1 << 20, 1 << 24


class ArrivingGradients:
    """Adds gradients to those of masters, which may have another type. A large gradient is added at once, so that its memory is free
    again. Small ones wait for each other, at most until the backward pass ends, since each addition of its own costs the host more time
    than the GPU."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}
        self._elements = 0

    @torch.no_grad()
    def add(self, master: Tensor, grad: Tensor) -> None:
        """Add ``grad``, which autograd does not change any more, to ``master.grad``. Called during a backward pass."""
        if grad.numel() > _SMALL:
            self._add_all([(master, grad)])
            return
        if id(master) in self._waiting or self._elements + grad.numel() > _MOST:
            self.finish()
        if not self._waiting:
            Variable._execution_engine.queue_callback(self.finish)
        self._waiting[id(master)] = master, grad
        self._elements += grad.numel()

    @torch.no_grad()
    def finish(self) -> None:
        """Add the gradients that wait."""
        waiting = list(self._waiting.values())
        self.drop()
        self._add_all(waiting)

    def drop(self) -> None:
        """Forget the gradients that wait, those of a backward pass that failed."""
        self._waiting, self._elements = {}, 0

    def _add_all(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        first = [(master, grad) for master, grad in pairs if master.grad is None]
        more = [(master.grad, grad) for master, grad in pairs if master.grad is not None]
        if first:
            made = [torch.empty_like(grad, dtype=master.dtype) for master, grad in first]
            torch._foreach_copy_(made, [grad for _, grad in first])
            for (master, _), grad in zip(first, made, strict=True):
                master.grad = grad
        if more:
            torch._foreach_add_([total for total, _ in more], [grad for _, grad in more])
