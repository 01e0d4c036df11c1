"""Optimizer steps of parameters that live in host memory (``model.storage.mark_hosted``), on the device that computes with them.

Master weight and optimizer state of one tensor at a time travel to the device and back. AdamW treats every element alone, so the result
is that of one step over all tensors. The gradients, which accumulate in host memory, are on the device together for the duration of the
step, because clipping needs the norm of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from miles_embedded.model.storage import device_of_hosted, put_in_host_memory


class HostedMasters:
    """The masters of hosted parameters.

    Args:
        copies: the model's trained parameters by name.
        masters: name -> tensor that the optimizer steps, in host memory for a hosted parameter.
    """

    def __init__(self, copies: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
        self._devices = {n: device for n, p in copies.items() if (device := device_of_hosted(p)) is not None}
        self._masters = masters
        for name, device in self._devices.items():
            master = masters[name]
            if master is not copies[name]:
                master.data = put_in_host_memory(master.data, device)

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
                state[key] = put_in_host_memory(value, device)
            elif value is not home:
                home.copy_(value)
                state[key] = home
