"""Norms that Megatron-Core lacks: over all heads of queries or keys, and with 1 + weight in its local modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


class WholeNorm(MegatronModule):
    """RMSNorm over the heads of all tensor-parallel ranks; each rank holds the weights of its heads.

    Args:
        heads: number of heads of the whole model.
        config: Megatron-Core's configuration.
        hidden_size: size of a head.
        eps: added to the mean square.
    """

    def __init__(self, heads: int, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(config=config)
        self.width, self.eps = heads * hidden_size, eps
        here = self.width // config.tensor_model_parallel_size
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = nn.Parameter(torch.ones(here, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise [tokens, batch, heads on this rank, head size]."""
        x = heads.flatten(2).float()
        squares = _Everywhere.apply(x.square().sum(-1, keepdim=True))
        normal = x * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normal.to(heads.dtype)).view_as(heads)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the state for Megatron-Core's checkpoints; weights are sharded along the heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


class CentredNorm(MegatronModule):
    """RMSNorm that multiplies by 1 + weight, for Megatron-Core's local modules; TransformerEngine's norms have an option for it.

    Args:
        config: Megatron-Core's configuration.
        hidden_size: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(config=config)
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., hidden_size]."""
        found = x.float()
        found = found * torch.rsqrt(found.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight.float())
        return found.to(x.dtype)


class _Everywhere(torch.autograd.Function):
    """Sum over tensor-parallel ranks. The backward pass sums too, because every rank's output depends on the result."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return _summed(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _summed(grads[0])


def _summed(value: Tensor) -> Tensor:
    found = value.clone()
    dist.all_reduce(found, group=parallel_state.get_tensor_model_parallel_group())
    return found
