"""Gradients of latent attention's rotary keys under tensor parallelism, with Megatron-Core's local modules.

All heads share one rotary key per token (DeepSeek-V2, section 2.1.3), so its gradient is the sum over the heads of all tensor-parallel
ranks. The local modules split the projection that computes it; Megatron-Core gathers its output, and the backward pass of that gather keeps
the gradient of the rank's own heads only. TransformerEngine's modules replicate the projection and have no such gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

Output = tuple[Tensor, Tensor | None]


def sum_rotary_gradients(chunk: nn.Module, config: TransformerConfig) -> None:
    """Let every ``linear_kv_down_proj`` of a chunk return its whole output, with gradients summed over tensor-parallel ranks.

    Megatron-Core takes an output of full width as that of a replicated projection and does not gather it again.
    """
    for module in chunk.modules():
        projection = getattr(module, "linear_kv_down_proj", None)
        if isinstance(projection, nn.Module):
            projection.register_forward_hook(_gather_with(config))


def _gather_with(config: Any) -> Callable[[nn.Module, Any, Output], Output]:
    """Return the forward hook of a projection to [tokens, ..., latent + rotary], of which a rank has the columns of its share."""

    def gather(module: nn.Module, args: Any, output: Output) -> Output:
        whole = gather_from_tensor_model_parallel_region(output[0])
        if config.sequence_parallel:
            # Megatron-Core gathers the rotary keys of all tokens; the backward pass of that gather sums over ranks
            return scatter_to_sequence_parallel_region(whole), output[1]
        latent, keys = torch.split(whole, [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat([latent, copy_to_tensor_model_parallel_region(keys)], dim=-1), output[1]

    return gather
