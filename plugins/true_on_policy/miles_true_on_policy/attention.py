"""Attention in which a query's result depends only on its keys, so that it is bit-identical in prompts, decode steps and packed training
batches.

On a GPU one kernel computes every call (``tiles``, ``attention_kernel``). On a CPU every call is first converted to one layout: keys and
values of each sequence by position (``sequences``). The keys are then read in blocks of ``BLOCK`` positions. The scores of a block are one
product of whole tiles of queries. Keys are summed within a block, and blocks are added in order. Blocks beyond a query contribute exactly
zero, so the length of the longest sequence has no effect. Scores, softmax and sums are FP32 (FP64 for an FP64 model).

The backward pass uses flash attention if it supports the call (a GPU, no options); otherwise it recomputes the call's own attention.
Gradients may depend on the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from miles_core.plugin import ConfigError
from miles_embedded import AttentionOptions, Call, PackedCall
from miles_true_on_policy import products
from miles_true_on_policy.elementwise import apply_aligned
from miles_true_on_policy.products import multiply, pad_tiles, sum_rows
from miles_true_on_policy.sequences import Sequences, sequences_of

#: Keys of a block.
BLOCK = 64
#: Largest number of scores in memory at once.
_SCORES = 1 << 24


def attend(
    call: Call,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    options: AttentionOptions | None,
) -> Tensor:
    """Compute the attention of one layer; see ``miles_embedded.Attention``.

    Raises:
        ConfigError: an indexer chose keys, attention is bidirectional within images, or ``sequences_of`` does not support the call.
    """
    if options is not None and options.choice is not None:
        raise ConfigError(
            "--true-on-policy-mode has no attention over keys that an indexer chose; leave it out for this model"
        )
    if options is not None and options.blocks is not None:
        raise ConfigError("--true-on-policy-mode has no attention in both directions within an image; leave it out")
    sinks = None if options is None else options.sinks
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, sinks)):
        found: Tensor = _Attention.apply(call, module, query, key, value, sinks, scaling, options)
        return found
    return _forward(call, module, query, key, value, scaling, options)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scaling: float,
        options: AttentionOptions | None,
    ) -> Tensor:
        sums = None
        if products.uses_kernels(query):
            sums = query.new_empty(query.shape[1:3], dtype=torch.float32)
        out = _forward(call, module, query, key, value, scaling, options, sums)
        ctx.save_for_backward(query, key, value, sinks, None if sums is None else out, sums)
        ctx.rest = call, module, scaling, options
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, module, scaling, options = ctx.rest
        needs = ctx.needs_input_grad[2:6]
        *saved, out, sums = ctx.saved_tensors
        if sums is not None and options is None and isinstance(call, PackedCall):
            query, key, value = saved[:3]
            fast = call.gradients(grads[0], query, key, value, out, sums, scaling)
            if fast is not None:
                return None, None, *fast, None, None, None
        with torch.enable_grad():
            inputs = [None if x is None else x.detach().requires_grad_(n) for x, n in zip(saved, needs, strict=True)]
            query, key, value, sinks = inputs
            if sinks is not None:
                options = replace(options, sinks=sinks)
            out = call.attend(module, query, key, value, scaling, options)
        wanted = [x for x, need in zip(inputs, needs, strict=True) if x is not None and need]
        found = iter(torch.autograd.grad(out, wanted, grads[0]))
        grad = [next(found) if need else None for need in needs]
        return None, None, *grad, None, None


@torch.no_grad()
def _forward(
    call: Call,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    options: AttentionOptions | None,
    sums: Tensor | None = None,
) -> Tensor:
    """Attend query [1, heads, rows, dim]; returns [1, rows, heads, value dim]. ``sums`` [heads, rows] receives the log of each query's sum of
    exponentials on a GPU."""
    if products.uses_kernels(query):
        from miles_true_on_policy.tiles import attend_by_tiles

        return attend_by_tiles(call, module, query, key, value, scaling, options, sums)
    found = sequences_of(call, module, query, key, value)
    heads, width = query.shape[1], value.shape[3]
    flat = query.new_empty(found.count * found.queries, heads, width)
    by_sequence = flat.view(found.count, found.queries, heads, width)
    rows = max(1, _SCORES // (heads * found.keys.shape[1]))
    at_once = max(1, rows // found.queries)
    for first in range(0, found.count, at_once):
        part = slice(first, first + at_once)
        for start in range(0, found.queries, rows):
            piece = slice(start, start + rows)
            by_sequence[part, piece] = _attend(found.select(part, piece), scaling, options)
    return flat.index_select(0, found.places).unsqueeze(0)


def _attend(found: Sequences, scaling: float, options: AttentionOptions | None) -> Tensor:
    """Attend the queries of some sequences; returns [sequences, queries, heads, value dim]."""
    options = options or AttentionOptions()
    count, length, heads, dim = found.query.shape
    kv_heads = found.keys.shape[2]
    shared = heads // kv_heads
    wide = torch.promote_types(found.query.dtype, torch.float32)
    # one matrix per (sequence, kv head); its rows are the queries of every head that shares the kv head
    q = found.query.view(count, length, kv_heads, shared, dim).permute(0, 2, 1, 3, 4)
    q = pad_tiles(q.reshape(count * kv_heads, length * shared, dim).to(wide))
    keys, values = (_blocks(x, wide) for x in (found.keys, found.values))
    blocks = keys.shape[1]
    column = torch.arange(blocks * BLOCK, device=q.device)
    seen = options.sees(found.positions[:, :, None], column)
    seen = seen[:, None, :, None].expand(-1, kv_heads, -1, shared, -1).reshape(len(q), length * shared, blocks, BLOCK)
    hidden = pad(~seen, (0, 0, 0, 0, 0, q.shape[1] - length * shared))
    scores = torch.stack([multiply(q, keys[:, i].transpose(1, 2)) for i in range(blocks)], 2).mul_(scaling)
    if options.cap:
        scores = apply_aligned(torch.tanh, scores.div_(options.cap)).mul_(options.cap)
    scores.masked_fill_(hidden, -torch.inf)
    highest = scores.amax((2, 3))
    sinks = None
    if options.sinks is not None:
        sinks = options.sinks.to(wide).view(1, kv_heads, 1, shared).expand(count, -1, length, -1)
        sinks = pad(sinks.reshape(len(q), length * shared), (0, q.shape[1] - length * shared))
        highest = torch.maximum(highest, sinks)
    weights = apply_aligned(torch.exp, scores.sub_(highest[:, :, None, None]))
    parts = sum_rows(weights)
    total = torch.zeros_like(highest) if sinks is None else apply_aligned(torch.exp, sinks - highest)
    out = q.new_zeros(*q.shape[:2], values.shape[3])
    for i in range(blocks):
        total += parts[:, :, i]
        out += multiply(weights[:, :, i].contiguous(), values[:, i])
    out = (out / total.unsqueeze(2))[:, : length * shared].to(found.values.dtype)
    out = out.view(count, kv_heads, length, shared, -1).transpose(1, 2)
    return out.reshape(count, length, heads, -1)


def _blocks(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[sequences, keys, kv heads, dim] -> [sequences * kv heads, blocks, BLOCK, dim], padded with zeros."""
    x = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % BLOCK)).to(dtype)
    count, width, heads, dim = x.shape
    return x.transpose(1, 2).reshape(count * heads, width // BLOCK, BLOCK, dim)
