"""Parameters sharded across processes: the local shard and the full tensor.

FSDP2 stores a parameter as a ``DTensor``: each process has ``ceil(rows / processes)`` consecutive rows of the first dimension, the last
processes fewer or none. The rest of this backend uses plain tensors, through these functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


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
