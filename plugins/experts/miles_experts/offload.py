"""Expert weights in host memory, on the device only while a layer uses them.

The parameters of a layer's experts are stored in pinned host memory. Before the experts run, they are replaced by a copy on the device; the
next layer's copy starts at the same time on a separate stream. Autograd keeps only a reference, and the backward pass copies the weights
again, in reverse order of layers. Gradients of micro-batches accumulate in host memory; the optimizer steps the
master weights and moments of one tensor after another on the device (``miles_embedded.mark_hosted``). Values and the order of operations are those of
weights that stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from miles_core.data import WeightUnit
from miles_embedded import active_context, mark_hosted, offload_gradient, routed_blocks

#: Key in ``Context.attached`` of the layers that a training pass has visited; a second visit is a recomputation.
VISITED = "experts.visited"


def offload_experts(model: nn.Module) -> None:
    """Move the experts of a model of the embedded backend to host memory."""
    device = next(model.parameters()).device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    layers = [OffloadedExperts(found.experts, device, stream) for found in routed_blocks(model)]
    for before, after in pairwise(layers):
        before.next, after.previous = after, before


class OffloadedExperts:
    """The experts of one layer.

    Args:
        experts: the module; its parameters move to host memory.
        device: device that computes with them.
        stream: stream of the copies on a GPU, else None.

    Attributes:
        next, previous: the layers whose weights are copied ahead in a forward and a backward pass.
    """

    def __init__(self, experts: nn.Module, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.device, self.stream = device, stream
        self.next: OffloadedExperts | None = None
        self.previous: OffloadedExperts | None = None
        self.parameters = {n: p for n, p in experts._parameters.items() if p is not None}
        mark_hosted(self.parameters.values(), device)
        self._values: dict[str, Tensor] = {}
        self._versions: list[int] = []
        self._copied: torch.cuda.Event | None = None
        self._notes: saved_tensors_hooks | None = None
        self._returned = 0
        experts.register_forward_pre_hook(self._enter)
        experts.register_forward_hook(self._leave, always_call=True)

    def copy(self) -> None:
        """Start to copy the weights to the device, unless a copy of their current values exists."""
        versions = [p._version for p in self.parameters.values()]
        if self._values and self._versions == versions:
            return
        self._versions = versions
        if self.stream is None:
            self._values = {n: p.detach().clone() for n, p in self.parameters.items()}
            return
        with torch.cuda.stream(self.stream):
            self._values = {n: p.detach().to(self.device, non_blocking=True) for n, p in self.parameters.items()}
            self._copied = self.stream.record_event()

    def values(self) -> Mapping[str, Tensor]:
        """Return the weights on the device."""
        self.copy()
        if self._copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._copied)
            for value in self._values.values():
                value.record_stream(current)
            self._copied = None
        return self._values

    def drop(self) -> None:
        """Drop the copy on the device; its memory is freed together with the last graph tensor that refers to it."""
        self._values, self._copied = {}, None

    def _enter(self, experts: nn.Module, args: Any) -> None:
        ctx = active_context()
        visited = set() if ctx is None else ctx.attached.setdefault(VISITED, set())
        values, ahead = self.values(), self.previous if id(self) in visited else self.next
        if ahead is not None:
            ahead.copy()
        for name, parameter in self.parameters.items():
            value = values[name]
            if torch.is_grad_enabled() and parameter.requires_grad:
                value = _Borrow.apply(parameter, value, self)  # type: ignore[no-untyped-call]
            experts.__dict__[name] = value
        # with recomputation, the layer keeps nothing of the first visit, and the second one is followed by its backward pass
        if torch.is_grad_enabled() and not (ctx is not None and ctx.recompute):
            self._notes = saved_tensors_hooks(self._note, self._find)
            self._notes.__enter__()
        if ctx is not None and ctx.recompute and torch.is_grad_enabled():
            visited.add(id(self))

    def _leave(self, experts: nn.Module, args: Any, output: Any) -> None:
        if self._notes is not None:
            self._notes.__exit__()
            self._notes = None
        for name in self.parameters:
            experts.__dict__.pop(name, None)
        self.drop()

    def give_back(self) -> None:
        """Drop the copy on the device after the backward pass of the last parameter."""
        self._returned += 1
        if self._returned == sum(p.requires_grad for p in self.parameters.values()):
            self._returned = 0
            self.drop()

    def _note(self, tensor: Tensor) -> Any:
        """Return the object that autograd keeps for a tensor: for a weight, its name and layout."""
        place = tensor.untyped_storage().data_ptr()
        for name, value in self._values.items():
            if value.untyped_storage().data_ptr() == place:
                return name, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def _find(self, kept: Any) -> Tensor:
        """Return the tensor of a note, in a backward pass."""
        if isinstance(kept, Tensor):
            return kept
        name, *layout = kept
        value = self.values()[name]
        if self.previous is not None:
            self.previous.copy()
        return value.as_strided(*layout)


class _Borrow(torch.autograd.Function):
    """Return a parameter's copy on the device; the gradient returns to the parameter in host memory."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor, layer: OffloadedExperts) -> Tensor:
        ctx.parameter, ctx.layer = parameter, layer
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layer.give_back()
        return offload_gradient(ctx.parameter, grads[0]), None, None


def on_device(units: Iterator[WeightUnit], device: torch.device) -> Iterator[WeightUnit]:
    """Yield the units of an export stream with their tensors on the device of the model."""
    for unit in units:
        if all(tensor.device == device for tensor in unit.tensors.values()):
            yield unit
        else:
            yield replace(unit, tensors={n: t.to(device) for n, t in unit.tensors.items()}, lasting=False)
