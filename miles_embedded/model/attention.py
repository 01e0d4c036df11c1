"""Attention for engine and trainer: options beyond plain causal attention, and attention over padded sequences.

Transformers' families add these options to causal attention. Any layer may have any of them:

- a sliding window: a query attends to the last ``window`` keys, itself included;
- chunks: positions are divided into chunks of ``chunk``, and a query attends to keys of its own chunk (Llama 4);
- a soft cap: a score s becomes ``cap * tanh(s / cap)`` (Gemma 2);
- sinks: a logit per head that takes part in the softmax without a value, so the attention weights may sum to less than one;
- a choice: an indexer selects the keys of each query (``indexer``);
- blocks: the tokens of one image attend to each other in both directions (Gemma 3).

A layer without options has no ``AttentionOptions``. A window that covers all keys of a call counts as no window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad, scaled_dot_product_attention

#: Argument of the decoder stack with ``AttentionOptions.blocks``.
BLOCKS = "image_blocks"
#: Up to this many keys, plain matrix products are faster on a CPU.
_SHORT = 64


@dataclass(frozen=True)
class ChosenKeys:
    """Keys chosen by an indexer. The content of ``masks`` is private to the call that made it in ``choose``; None means all keys."""

    masks: Any = None


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one layer's attention beyond plain causal attention.

    Attributes:
        window: keys a query attends to; 0 for all.
        sinks: [heads] logits.
        choice: keys chosen by an indexer.
        chunk: length of the chunks; 0 for none.
        cap: soft cap of the scores; 0 for none.
        blocks: [rows] number of the block of each row of the call in its sequence, -1 outside blocks. Rows of a block see each other, also
            later ones, within the window. Fed tokens of cached rows are in no block.
    """

    window: int = 0
    sinks: Tensor | None = None
    choice: ChosenKeys | None = None
    chunk: int = 0
    cap: float = 0.0
    blocks: Tensor | None = None

    def within(self, longest: int) -> AttentionOptions | None:
        """Drop options without effect for at most ``longest`` keys per query; None if none is left."""
        window, chunk = (size if size < longest else 0 for size in (self.window, self.chunk))
        choice = self.choice if self.choice is not None and self.choice.masks is not None else None
        left = replace(self, window=window, choice=choice, chunk=chunk)
        return None if left == AttentionOptions() else left

    def sees(self, query: Tensor, key: Tensor, together: Tensor | None = None) -> Tensor:
        """Return a bool tensor, broadcast from query and key positions: causal or in one block (``together``, see ``same_block``), and inside
        the query's window and chunk."""
        seen = key <= query
        if together is not None:
            seen = seen | together
        if self.window:
            seen &= key > query - self.window
        if self.chunk:
            seen &= key // self.chunk == query // self.chunk
        return seen

    @property
    def hides(self) -> tuple[int, int]:
        """(window, chunk), which determine the result of ``sees``."""
        return self.window, self.chunk


def attention_options(
    module: nn.Module, attention_mask: Tensor | None, arguments: dict[str, Any]
) -> AttentionOptions | None:
    """Derive the options from the arguments of an attention function: module, mask and keyword arguments."""
    local = arguments.get("sliding_window") or (0 if attention_mask is None else int(attention_mask))
    sinks, choice, cap, blocks = (arguments.get(name) for name in ("s_aux", "indices", "softcap", BLOCKS))
    if not local and sinks is None and choice is None and not cap and blocks is None:
        return None
    window, chunk = (0, local) if _is_chunked(module) else (local, 0)
    return AttentionOptions(window, sinks, choice, chunk, cap or 0.0, blocks)


def same_block(query: Tensor, key: Tensor) -> Tensor:
    """Return a bool tensor, broadcast from the blocks of queries and keys: both are in the same one."""
    return (query == key) & (key >= 0)


def _is_chunked(module: Any) -> bool:
    """Whether the layer's local attention is chunked rather than windowed."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return kinds is not None and kinds[module.layer_idx] == "chunked_attention"


@cache
def window_mask(window: int) -> Tensor:
    """Return a placeholder for the mask of a sliding window or of chunks, which contains its size.

    Not every module passes the size to its attention function, but every module passes a mask.
    """
    return torch.full((1, 1, 1, 1), window)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[queries, keys] True where a query attends to a key, with the last query at the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def add_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add the sinks as one more key in front, so that any attention function can apply them.

    Query heads that share a key head have different sinks. Queries and keys therefore get one additional dimension per such head: a
    query is 1 in the dimension of its head, and the added key contains that head's sink there. The added value is 0.

    Args:
        q: [n, heads, queries, dim].
        k: [n, kv heads, keys, dim].
        v: [n, kv heads, keys, width].
        mask: bool, [n or 1, 1, queries, keys].
        sinks: [heads].
        scaling: factor that will be applied to the scores.

    Returns:
        q, k, v and mask with one more key, otherwise the same layout.
    """
    shared = q.shape[1] // k.shape[1]
    head = torch.arange(q.shape[1], device=q.device) % shared
    own = one_hot(head, shared).to(q.dtype)[None, :, None].expand(len(q), -1, q.shape[2], -1)
    key = pad((sinks / scaling).to(k.dtype).view(k.shape[1], 1, shared), (k.shape[3], 0))
    k = torch.cat([key.expand(len(k), -1, -1, -1), pad(k, (0, shared))], 2)
    return torch.cat([q, own], 3), k, pad(v, (0, 0, 1, 0)), pad(mask, (1, 0), value=True)


def attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    gqa: bool,
    options: AttentionOptions | None = None,
) -> Tensor:
    """Attend q [segments, heads, length, dim] to k and v [segments, kv heads, keys, dim]; causal if ``mask`` is None.

    Applies the cap and the sinks of ``options``; ``mask`` must already include the other options.
    """
    options = options or AttentionOptions()
    if mask is None and (options.cap or options.sinks is not None):
        mask = causal_mask(q.shape[2], k.shape[2], q.device)[None, None]
    if mask is not None and options.cap:
        return _attend_capped(q, k, v, mask, scaling, options)
    if mask is not None and options.sinks is not None:
        q, k, v, mask = add_sinks(q, k, v, mask, options.sinks, scaling)
    if k.shape[2] <= _SHORT and q.device.type == "cpu":
        return ShortAttention.apply(q, k, v, mask, scaling)
    # Fused kernels require keys and values of equal width (DeepSeek-V3 has 192 and 128).
    width = v.shape[-1]
    if width < k.shape[-1]:
        v = pad(v, (0, k.shape[-1] - width))
    if gqa and q.is_cuda:
        # The memory-efficient kernel, the only one with masks and float32, does not support grouped heads.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        gqa = False
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa)
    return out[..., :width]


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, options: AttentionOptions) -> Tensor:
    """Attend with a soft cap. Fused kernels do not support it, so all scores are in memory at once."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = options.cap * torch.tanh(q @ k.transpose(2, 3) * scaling / options.cap)
    scores = scores.to(_at_least_float32(q.dtype)).masked_fill(~mask, -torch.inf)
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


class ShortAttention(torch.autograd.Function):
    """Attention over few keys as plain batched products. For tens of keys the blocks of the fused CPU kernel are mostly empty, and its
    backward pass takes twice as long. Query heads that share keys are rows of one product."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        segments, kv_heads, keys, _ = k.shape
        length = q.shape[2]
        batch = segments * kv_heads
        if mask is None:
            mask = torch.ones(1, 1, length, keys, dtype=torch.bool, device=q.device).tril()
        q, k, v = (x.reshape(batch, -1, x.shape[3]) for x in (q, k, v))
        hidden = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
        scores = torch.bmm(q, k.transpose(1, 2)).view(segments, -1, length, keys)
        weights = scores.mul_(scaling).add_(hidden).softmax(-1, dtype=_at_least_float32(q.dtype)).to(q.dtype)
        weights = weights.view(batch, -1, keys)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scaling, ctx.shape = scaling, (segments, -1, length)
        return torch.bmm(weights, v).view(segments, -1, length, v.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        grad = grads[0].reshape(len(q), -1, v.shape[2])
        grad_v = torch.bmm(weights.transpose(1, 2), grad)
        wide = _at_least_float32(q.dtype)
        inner = torch._softmax_backward_data(torch.bmm(grad, v.transpose(1, 2)).to(wide), weights.to(wide), -1, wide)
        inner = inner.mul_(ctx.scaling).to(q.dtype)
        grad_q, grad_k = torch.bmm(inner, k), torch.bmm(inner.transpose(1, 2), q)
        segments, _, length = ctx.shape
        return (
            grad_q.view(segments, -1, length, q.shape[2]),
            grad_k.view(segments, -1, *grad_k.shape[1:]),
            grad_v.view(segments, -1, *grad_v.shape[1:]),
            None,
            None,
        )


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
