"""AdamW on the host: both moments are in host memory, and the step is computed by the CPU.

Before a step, master weights and clipped gradients are copied to (pinned) host memory; afterwards the weights are copied back. On the GPU
this saves the 8 bytes per parameter of the moments. With ``--offload-optimizer`` the 4 bytes of the FP32 masters are also on the host
between steps.

torchao's ``CPUOffloadOptimizer`` is not used: it copies each gradient when the backward pass has computed it, before gradients are
summed over ranks and clipped, and it needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_core.plugin import Policy, Run
from miles_core.trainer import OptimizerConfig

State = dict[str, Tensor]


def make_optimizer(run: Run, policy: Policy, groups: Sequence[dict[str, Any]]) -> HostAdamW:
    """Provider of ``--optimizer adamw-offload``."""
    return HostAdamW(groups, OptimizerConfig.of(run.config_of(policy)))


class HostAdamW:
    """An optimizer with torch's interface whose state is on the host.

    Args:
        groups: torch's parameter groups with their weight decay; parameters are FP32.
        config: settings of AdamW.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], config: OptimizerConfig) -> None:
        self.param_groups = list(groups)
        self._host = {p: _on_host(p) for group in groups for p in group["params"]}
        for host in self._host.values():
            host.grad = _on_host(host)
        self._grads = {p: host.grad for p, host in self._host.items()}
        self._inner = torch.optim.AdamW(
            [{"params": [self._host[p] for p in group["params"]]} for group in groups],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.state = HostState(self._host, self._inner.state)
        self.defaults: dict[str, Any] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Step all parameters with a gradient."""
        moving = [p for p in self._host if p.grad is not None]
        for parameter, host in self._host.items():
            host.grad = None if parameter.grad is None else self._grads[parameter]
            if host.grad is not None:
                host.copy_(parameter, non_blocking=True)
                host.grad.copy_(parameter.grad, non_blocking=True)
        _await_copies(moving)
        for group, own in zip(self.param_groups, self._inner.param_groups, strict=True):
            own["lr"], own["weight_decay"] = group["lr"], group["weight_decay"]
        self._inner.step()
        for parameter in moving:
            parameter.copy_(self._host[parameter], non_blocking=True)
        _await_copies(moving)


class HostState(MutableMapping[Tensor, State]):
    """The state of each parameter, whose tensors are stored on the host.

    Args:
        host: parameter -> its copy on the host.
        state: copy -> its state.
    """

    def __init__(self, host: Mapping[Tensor, Tensor], state: MutableMapping[Tensor, State]) -> None:
        self._host, self._state = host, state

    def __getitem__(self, parameter: Tensor) -> State:
        host = self._host[parameter]
        if host not in self._state:
            raise KeyError(parameter)
        return self._state[host]

    def __setitem__(self, parameter: Tensor, state: State) -> None:
        self._state[self._host[parameter]] = {name: value.cpu() for name, value in state.items()}

    def __delitem__(self, parameter: Tensor) -> None:
        del self._state[self._host[parameter]]

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for parameter, host in self._host.items() if host in self._state)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _on_host(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=torch.cuda.is_available())


def _await_copies(parameters: Sequence[Tensor]) -> None:
    if parameters and parameters[0].is_cuda:
        torch.cuda.synchronize()
