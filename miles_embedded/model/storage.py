"""Storage of a parameter's values: whole or as a shard, trained or constant, as numbers or as codes.

Constant parameters keep their values for the whole run, such as the base model under adapters. A weight update may leave them out,
checkpoints do not contain them (they come from ``--hf-checkpoint`` again), and they survive the sleep of an engine. A constant parameter
may also be stored as the codes of a number format only (``quantized.encoded``), and so may an engine's parameter whose product reads codes
(``quantized.freed``): its own storage is then empty, and ``full_values`` decodes it.

A hosted parameter is stored in host memory although another device computes with it: a plugin copies it to the device when a layer needs
it, and passes its gradients to ``offload_gradient``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_CONSTANT, _STREAMED, _CODES, _HOSTED = "miles_constant", "miles_streamed", "miles_codes", "miles_hosted"
_TAKES_GRADIENTS = "miles_takes_gradients"


@dataclass(frozen=True)
class LocalShard:
    """The local shard of a tensor.

    Attributes:
        tensor: the local rows as a plain tensor without gradient, sharing memory with the parameter.
        first: index of its first row in the full tensor.
        shape: shape of the full tensor.
        sharded: whether other processes store other rows.
    """

    tensor: Tensor
    first: int
    shape: tuple[int, ...]
    sharded: bool

    @property
    def elements(self) -> tuple[int, int]:
        """Start and end of the local rows in the full tensor, in elements."""
        row = math.prod(self.shape[1:])
        return self.first * row, (self.first + len(self.tensor)) * row

    def take(self, tensor: Tensor) -> None:
        """Copy this process's rows of the full ``tensor``, of any dtype, to the shard."""
        self.tensor.copy_(tensor[self.first : self.first + len(self.tensor)] if self.sharded else tensor)


@torch.no_grad()
def local_shard(tensor: Tensor) -> LocalShard:
    """Return the local shard of ``tensor``; all of it if it is not sharded."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.detach(), 0, shape, False)
    mesh, own = tensor.device_mesh, tensor.to_local()
    rows = -(-shape[0] // mesh.size())
    return LocalShard(own.detach(), min(mesh.get_local_rank() * rows, shape[0]), shape, True)


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters are sharded, so that a layer has them only during its computation."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


@torch.no_grad()
def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the full ``tensor`` as a plain tensor. A collective operation if it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class Codes(Protocol):
    """What is stored of an encoded parameter."""

    def values(self) -> Tensor:
        """Decode: the values in the shape, strides and dtype of the parameter."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield the stored tensors."""


def mark_constant(parameters: Iterable[nn.Parameter], streamed: bool = True) -> None:
    """Declare that these parameters keep their values for the rest of the run, and exclude them from training.

    Args:
        parameters: the parameters.
        streamed: whether the trainer's export stream (``Trainer.units``) contains them. Without them a weight sync has to gather and send
            only the others; a plugin adds them to the stream of an export (``full_values``).
    """
    for parameter in parameters:
        parameter.requires_grad_(False)
        setattr(parameter, _CONSTANT, True)
        setattr(parameter, _STREAMED, streamed)


def is_constant(parameter: Any) -> bool:
    """Whether ``mark_constant`` was called for this parameter."""
    return bool(getattr(parameter, _CONSTANT, False))


def is_streamed(parameter: Any) -> bool:
    """Whether the export stream contains this parameter."""
    return bool(getattr(parameter, _STREAMED, True))


def mark_hosted(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move parameters to host memory, together with their gradients, master weights and optimizer state. Call it before the trainer is
    made, as in ``on_model``. The modules that compute with them have to bring their values to ``device``, and pass their gradients to
    ``offload_gradient``."""
    for parameter in parameters:
        parameter.data = copy_to_host(parameter.data, device)
        setattr(parameter, _HOSTED, device)


def device_of_hosted(parameter: Any) -> torch.device | None:
    """Return the device that computes with a hosted parameter; None if it is not hosted."""
    found: torch.device | None = getattr(parameter, _HOSTED, None)
    return found


def take_gradients(parameter: nn.Parameter, take: Callable[[Tensor], None]) -> None:
    """Let ``take`` receive the gradients of a hosted parameter, on the device that computed them."""
    setattr(parameter, _TAKES_GRADIENTS, take)


def offload_gradient(parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """Pass on a gradient of a hosted parameter during a backward pass.

    Returns:
        what a backward function has to return for the parameter: None if the optimizer has taken the gradient, otherwise the gradient in
        host memory, which autograd adds to ``parameter.grad``.
    """
    take: Callable[[Tensor], None] | None = getattr(parameter, _TAKES_GRADIENTS, None)
    if take is None:
        return gradient.to(parameter.device)
    take(gradient)
    return None


@torch.no_grad()
def copy_to_host(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of ``tensor`` with the same strides in host memory, pinned if ``device`` is a GPU, so that copies run next to
    computations. ``dtype``: that of the copy, the tensor's own by default."""
    host = torch.empty_like(tensor, device="cpu", dtype=dtype, pin_memory=device.type == "cuda")
    return host.copy_(tensor)


def put_codes(parameter: nn.Parameter, codes: Codes, device: torch.device) -> None:
    """Store a parameter as ``codes`` on ``device`` only, and free its own storage. Shape, strides and dtype do not change."""
    setattr(parameter, _CODES, codes)
    parameter.data = _without_storage(parameter.data, device)


def put_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Store a parameter as numbers again, in the memory of ``values``; reverts ``put_codes``."""
    delattr(parameter, _CODES)
    parameter.data = values


def codes_of(parameter: Any) -> Codes | None:
    """Return the codes of a parameter; None if its values are stored."""
    found: Codes | None = getattr(parameter, _CODES, None)
    return found


def constant_tensors(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Yield the memory of the constant ones among ``parameters``: their own, or their codes."""
    for parameter in parameters:
        codes = codes_of(parameter)
        if codes is not None:
            yield from codes.tensors()
        elif is_constant(parameter):
            yield local_shard(parameter).tensor


def full_values(tensor: Tensor) -> Tensor:
    """Return the values of a module tensor: gathered from all ranks if it is sharded, decoded if only its codes are stored."""
    codes = codes_of(tensor)
    return gather_tensor(tensor) if codes is None else codes.values()


def is_whole(tensor: Tensor) -> bool:
    """Whether this process stores all values of a module tensor, and as numbers."""
    return not isinstance(tensor, DTensor) and codes_of(tensor) is None


def _without_storage(like: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    empty.untyped_storage().resize_(0)
    return empty
