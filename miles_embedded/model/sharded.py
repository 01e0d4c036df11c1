"""Parameters that are divided among processes: what this process holds of them, and the whole of them.

FSDP2 keeps a parameter as a ``DTensor``: each process has some consecutive rows of its first dimension, ``ceil(rows / processes)``
of them until none are left. Everything else of this backend sees plain tensors, through these functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Held:
    """What this process holds of a tensor.

    Attributes:
        tensor: the rows themselves, plain, without gradient; writing to it writes the parameter.
        first: the number of its first row.
        shape: of the whole tensor.
        divided: other processes hold other rows.
    """

    tensor: Tensor
    first: int
    shape: tuple[int, ...]
    divided: bool

    @property
    def elements(self) -> tuple[int, int]:
        """Where the rows begin and end in the whole tensor, counted in elements."""
        row = math.prod(self.shape[1:])
        return self.first * row, (self.first + len(self.tensor)) * row

    def take(self, tensor: Tensor) -> None:
        """Copy this process's rows of ``tensor``, which is whole and has any dtype, into what it holds."""
        self.tensor.copy_(tensor[self.first : self.first + len(self.tensor)] if self.divided else tensor)


@torch.no_grad()
def held(tensor: Tensor) -> Held:
    """What this process holds of ``tensor``; of a plain one, all."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Held(tensor.detach(), 0, shape, False)
    mesh, own = tensor.device_mesh, tensor.to_local()
    rows = -(-shape[0] // mesh.size())
    return Held(own.detach(), min(mesh.get_local_rank() * rows, shape[0]), shape, True)


def is_divided(model: nn.Module) -> bool:
    """Whether processes share a model's parameters out, so that a layer has them only while it computes."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, plain: a collective where it is divided, and itself otherwise."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
