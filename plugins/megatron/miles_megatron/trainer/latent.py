"""Latent attention: the epsilon of its norms, and gradients of its rotary keys under tensor parallelism with Megatron-Core's local modules.

All heads share one rotary key per token (DeepSeek-V2, section 2.1.3), so its gradient is the sum over the heads of all tensor-parallel
ranks. The local modules split the projection that computes it; Megatron-Core gathers its output, and the backward pass of that gather keeps
the gradient of the rank's own heads only. TransformerEngine's modules replicate the projection and have no such gather.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

Output = tuple[Tensor, Tensor | None]


def set_norm_epsilon(chunk: nn.Module, epsilon: float) -> None:
    """Set the epsilon of the norms inside latent attention, which Megatron-Core builds with that of the other norms.

    TransformerEngine's modules fuse these norms into the projections that follow them."""
    for module in chunk.modules():
        if not hasattr(module, "linear_kv_down_proj"):
            continue
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            inner: Any = getattr(module, name, None)
            if hasattr(inner, "eps"):
                inner.eps = epsilon


def sum_rotary_gradients(chunk: nn.Module) -> None:
    """Let every ``linear_kv_down_proj`` of a chunk return its output for this rank's share of the tokens (sequence parallelism).

    Megatron-Core takes an output of full width as that of a replicated projection: it does not gather the columns again, and gathers the
    rotary keys of all tokens. The backward pass of that gather sums over ranks.
    """
    for module in chunk.modules():
        projection = getattr(module, "linear_kv_down_proj", None)
        if isinstance(projection, nn.Module):
            projection.register_forward_hook(_gather_columns)


def _gather_columns(module: nn.Module, args: Any, output: Output) -> Output:
    """Forward hook of a projection to [tokens, ..., latent + rotary], of which a rank has all tokens and the columns of its share."""
    whole = gather_from_tensor_model_parallel_region(output[0])
    return scatter_to_sequence_parallel_region(whole), output[1]
