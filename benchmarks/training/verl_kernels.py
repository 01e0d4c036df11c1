"""Two kernels for verl where flash-attn is not installed; ``verl_step.py`` names this module as verl's ``external_lib``.

verl asks flash-attn for attention of packed sequences and for a fused cross entropy. It can do without, but then masks all pairs of a packed
batch, and computes log-probabilities in a Python loop over tokens. Here, torch's own variable-length flash attention (``varlen_attn``)
takes the place of the first, through Transformers' ``AttentionInterface``, and a compiled cross entropy that of the second.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import transformers
import verl.utils.torch_functional as verl_functions
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

NAME = "packed_rows"  # Transformers looks for a kernel of that name if it contains "flash"
#: Bounds of the sequences of the latest packed batch: all layers of a forward pass share them.
_bounds: tuple[Tensor, Tensor, int] | None = None


def bounds_of(positions: Tensor) -> tuple[Tensor, int]:
    """Return the first index of every packed sequence and the end, int32, and the longest length. positions: [1, tokens]."""
    global _bounds
    if _bounds is None or _bounds[0] is not positions:
        flat = positions.flatten()
        starts = torch.nonzero(flat == 0).flatten()
        bounds = torch.cat([starts, starts.new_tensor([len(flat)])]).to(torch.int32)
        _bounds = positions, bounds, int(bounds.diff().max())
    return _bounds[1:]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence. Shapes [1, heads, tokens, width], result [1, tokens, heads, width]."""
    assert attention_mask is None and query.shape[0] == 1, "one packed row without a mask"
    bounds, longest = bounds_of(more["position_ids"])
    if not query.is_cuda:  # to rehearse
        parts = [[x[:, :, a:b] for x in (query, key, value)] for a, b in pairwise(bounds.tolist())]
        done = [scaled_dot_product_attention(*part, is_causal=True, scale=scaling, enable_gqa=True) for part in parts]
        return torch.cat(done, dim=2).transpose(1, 2), None
    rows = [x.squeeze(0).transpose(0, 1).to(torch.bfloat16).contiguous() for x in (query, key, value)]
    found = varlen_attn(*rows, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0))
    assert isinstance(found, Tensor)
    return found.unsqueeze(0), None


def cross_entropy(logits: Tensor, labels: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Negative log-probability of each label, FP32. logits: [tokens, vocabulary]."""
    return _compiled(logits, labels), None


@torch.compile(dynamic=True, disable=not torch.cuda.is_available())
def _compiled(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


transformers.AttentionInterface.register(NAME, attend)
verl_functions.cross_entropy_loss = cross_entropy
verl_functions.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True
