"""The experts' matrix products: tokens sorted by expert, one product an expert, no padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def sorted_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [rows, hidden], top_k_index and top_k_weights [rows, k] -> [rows, hidden]."""
    rows, k = top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=module.num_experts).tolist()
    token = torch.div(order, k, rounding_mode="floor")
    gathered = hidden_states.index_select(0, token)
    outputs = []
    for expert, chunk in enumerate(gathered.split(counts)):
        if len(chunk) == 0:
            continue
        gate_up = nn.functional.linear(chunk, module.gate_up_proj[expert])
        outputs.append(nn.functional.linear(module._apply_gate(gate_up), module.down_proj[expert]))
    out = torch.cat(outputs) * top_k_weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(hidden_states).index_add(0, token, out.to(hidden_states.dtype))
