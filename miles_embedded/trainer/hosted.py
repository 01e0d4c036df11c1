"""Optimizer steps, on the device, of parameters in host memory (``model.storage.mark_hosted``). The master weight and optimizer state of
one tensor at a time are copied to the device and back. AdamW is elementwise, so the result equals one step over all tensors. All gradients
are on the device during the step, because clipping needs their norm. Before the step they accumulate in pinned host memory, which is reused
from step to step: a separate stream copies the sum to the device and the new sum back while the backward pass continues. Pageable memory
that is allocated for each micro-batch would be much slower, because the operating system clears and maps every page again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from miles_embedded.model.storage import copy_to_host, device_of_hosted, take_gradients


class HostedMasters:
    """The masters of hosted parameters.

    Args:
        copies: the model's trained parameters by name.
        masters: name -> tensor that the optimizer steps, in host memory for a hosted parameter (``copy_to_host``).
    """

    def __init__(self, copies: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]) -> None:
        self._devices = {n: device for n, p in copies.items() if (device := device_of_hosted(p)) is not None}
        self._masters = masters
        self._sums: dict[str, Tensor] = {}
        gpus = {device for device in self._devices.values() if device.type == "cuda"}
        self._streams = {device: torch.cuda.Stream(device) for device in gpus}
        for name in self._devices:
            take_gradients(copies[name], partial(self._add, name))

    @torch.no_grad()
    def _add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient of a micro-batch, in the order of a model on the device; called during its backward pass."""
        master, stream = self._masters[name], self._streams.get(gradient.device)
        total = self._sums.get(name)
        if total is None:
            total = self._sums[name] = torch.empty_like(master, pin_memory=stream is not None)
        first, master.grad = master.grad is None, total
        if stream is None:
            total.copy_(gradient) if first else total.add_(gradient)
            return
        current = torch.cuda.current_stream(gradient.device)
        current.wait_stream(stream)  # wait for the previous sum: sums that wait for their copies would fill the device
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            if first:  # with the strides of the sum: another layout would be copied through pageable memory
                here = torch.empty_like(total, device=gradient.device, pin_memory=False).copy_(gradient)
            else:
                here = total.to(gradient.device, non_blocking=True).add_(gradient)
            total.copy_(here, non_blocking=True)
        gradient.record_stream(stream)
        Variable._execution_engine.queue_callback(stream.synchronize)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this step on the device, by name."""
        grads = ((name, self._masters[name].grad, device) for name, device in self._devices.items())
        return {name: grad.to(device) for name, grad, device in grads if grad is not None}

    def step(self, inner: torch.optim.Optimizer, grads: Mapping[str, Tensor]) -> None:
        """Step all masters: those on the device together, then each hosted one.

        Args:
            inner: the optimizer.
            grads: what ``gradients`` returned, after clipping.
        """
        for name in self._devices:
            self._masters[name].grad = None
        inner.step()
        if not grads:
            return
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for name, grad in grads.items():
            with self._on_device(inner, name):
                self._masters[name].grad = grad
                inner.step()
                self._masters[name].grad = None

    @contextmanager
    def _on_device(self, inner: torch.optim.Optimizer, name: str) -> Iterator[None]:
        master, device = self._masters[name], self._devices[name]
        home, state = master.data, inner.state.get(master, {})
        homes = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
        master.data = home.to(device)
        fused = inner.defaults.get("fused")  # it needs the step count on the device, too
        state.update({k: v.to(device) for k, v in state.items() if k in homes or (fused and isinstance(v, Tensor))})
        try:
            yield
        finally:
            if master.data is not home:
                home.copy_(master.data)
            master.data = home
            self._put_back(inner.state.get(master, {}), homes, device)

    @staticmethod
    def _put_back(state: dict[Any, Any], homes: Mapping[Any, Tensor], device: torch.device) -> None:
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.dim():
                continue
            home = homes.get(key)
            if home is None:  # the optimizer's first step made it
                state[key] = copy_to_host(value, device)
            elif value is not home:
                home.copy_(value)
                state[key] = home
