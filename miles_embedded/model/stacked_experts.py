"""The experts of Llama 4, which Transformers does not call through its experts interface.

Their input contains every row once per expert, sorted by expert, and one batched product computes all experts. Transformers' own forward
is used unless a number format rounds the rows in front of the products (``experts.round_inputs``).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from miles_embedded.model.grouped_experts import INPUT_ROUNDING


def stacked_experts(module: Llama4TextExperts, hidden_states: Tensor) -> Tensor:
    """Forward of Llama 4's experts, with rounded rows while rounding is enabled.

    Args:
        module: with ``gate_up_proj`` [experts, hidden, 2 * inner], gate first, and ``down_proj`` [experts, inner, hidden].
        hidden_states: [experts * rows, hidden].

    Returns:
        [experts * rows, hidden].
    """
    rounding = module.__dict__.get(INPUT_ROUNDING)
    if rounding is None or not rounding.enabled:
        plain: Tensor = type(module).forward(module, hidden_states)
        return plain
    hidden = hidden_states.reshape(-1, module.hidden_size)
    rows = len(hidden) // module.num_experts
    expert = partial(torch.arange(module.num_experts, device=hidden.device).repeat_interleave, rows)

    def product(x: Tensor, name: str) -> Tensor:
        x = rounding(name, x, expert)
        return torch.bmm(x.view(module.num_experts, rows, -1), getattr(module, name)).flatten(0, 1)

    gate, up = product(hidden, "gate_up_proj").chunk(2, dim=-1)
    return product(up * module.act_fn(gate), "down_proj")
