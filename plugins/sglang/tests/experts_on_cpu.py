"""SGLang's experts with adapters on a CPU, which has no kernels for them: a plugin of SGLang (``sglang.srt.plugins``) for tests.

SGLang's own classes load the adapters, divide them among experts and decide which adapter each token has; the products are computed here.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """What SGLang calls in each of its processes before it starts."""
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    FusedMoEWithLoRA._forward_with_lora = _experts


def _experts(layer: Any, hidden: Any, topk: Any, info: Any, **_: Any) -> Any:
    import torch
    from torch.nn.functional import silu

    base, rank, found = layer.base_layer, info.max_lora_rank, torch.zeros_like(hidden)
    for expert in range(base.num_experts):
        rows, places = (topk.topk_ids == expert).nonzero(as_tuple=True)
        lora, x = info.token_lora_mapping[rows].long(), hidden[rows]
        a, b = info.gate_up_lora_a_weights[lora, expert], info.gate_up_lora_b_weights[lora, expert]
        gate, up = (x @ base.w13_weight[expert].t()).chunk(2, -1)
        gate_b, up_b = b.chunk(2, 1)
        gate = gate + _add(x, a[:, :rank], gate_b)
        inner = silu(gate) * (up + _add(x, a[:, rank:], up_b))
        down = info.down_lora_a_weights[lora, expert], info.down_lora_b_weights[lora, expert]
        out = inner @ base.w2_weight[expert].t() + _add(inner, *down)
        found.index_add_(0, rows, (out * topk.topk_weights[rows, places][:, None]).to(found.dtype))
    return found


def _add(x: Any, a: Any, b: Any) -> Any:
    """B A x of each row: x [rows, in], A [rows, rank, in], B [rows, out, rank]."""
    return (b @ (a @ x[:, :, None]))[:, :, 0]
