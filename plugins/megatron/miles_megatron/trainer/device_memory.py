"""Releases a trainer's device memory while an engine uses the same GPU (``--colocate``).

Megatron-Core stores all parameters of a chunk, and all gradients, in a few flat buffers; parameters, gradients and the optimizer's FP32
shards are views of them. Resizing a storage to zero and back keeps these views valid (Megatron-Core's ``offload_to_cpu`` relies on the
same), so nothing has to be rebuilt when the trainer wakes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.trainer import TrainerPart
from miles_embedded import Released
from miles_megatron.trainer.optimizer import Optimizer


class DeviceMemory:
    """The device memory that one rank keeps between two calls.

    Args:
        wrapped: chunks in Megatron-Core's wrappers.
        optimizers: their optimizers, whose state may be allocated later, with the first step.
        others: further tensors, released with the weights.
    """

    def __init__(self, wrapped: Sequence[Any], optimizers: Sequence[Optimizer], others: Sequence[Tensor]) -> None:
        self._wrapped, self._others = wrapped, others
        self._inner = [part for each in optimizers for part in each.inner.chained_optimizers]
        self._weights, self._optimizer = Released(keep=True), Released(keep=True)
        self._gradients = Released(keep=False)  # the next step zeroes them

    def release(self, parts: Sequence[TrainerPart]) -> None:
        """Release the device memory of ``parts``. Their contents, except gradients, are saved in host memory."""
        if "optimizer" in parts and not self._gradients:
            weights = {storage_of(tensor) for tensor in self._weight_tensors()}
            self._optimizer.release(t for t in self._optimizer_tensors() if storage_of(t) not in weights)
            self._gradients.release(b.grad_data for b in self._buffers() if storage_of(b.grad_data) not in weights)
        if "weights" in parts and not self._weights:
            self._weights.release(self._weight_tensors())

    def restore(self, parts: Sequence[TrainerPart]) -> None:
        """Undo ``release``. Gradients are undefined until the next step zeroes them."""
        if "weights" in parts:
            self._weights.restore()
        if "optimizer" in parts:
            self._optimizer.restore()
            self._gradients.restore()

    def _buffers(self) -> Iterator[Any]:
        for wrapped in self._wrapped:
            yield from (*wrapped.buffers, *wrapped.expert_parallel_buffers)

    def _weight_tensors(self) -> Iterator[Tensor]:
        yield from (buffer.param_data for buffer in self._buffers() if buffer.param_data is not None)
        for wrapped in self._wrapped:
            module: nn.Module = wrapped.module
            yield from (parameter.data for parameter in module.parameters())
        yield from self._others

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield masters and moments on the device; those that ``--optimizer-offload-fraction`` keeps in host memory are skipped."""
        for adam in (part.optimizer for part in self._inner if part.optimizer is not None):
            for each in (adam, *getattr(adam, "sub_optimizers", ())):
                held = [p for group in each.param_groups for p in group["params"]]
                held += [value for state in each.state.values() for value in state.values()]
                for tensor in held:
                    if isinstance(tensor, Tensor) and (tensor.is_cuda or not torch.cuda.is_available()):
                        yield tensor


def storage_of(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage."""
    return tensor.untyped_storage()._cdata
