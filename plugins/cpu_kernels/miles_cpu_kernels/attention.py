"""Attention over few keys, for packed micro-batches of the trainer and decode steps of the engine.

With more keys, torch's matrix products are faster (benchmarks/training/cpu_kernels.py). Other attention than plain causal attention has no kernel
here and also uses torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_cpu_kernels import kernels
from miles_embedded import Attention, AttentionOptions, CachedRows, Call, DecodeCall, PackedCall, Packing

#: Maximum keys of the longest row for which the kernel is faster than matrix products: packed micro-batches, and decode steps.
PACKED_KEYS, DECODED_KEYS = 128, 64
#: Key in ``Context.attached`` of the segments or cache positions of a call, which all its layers share.
_PLACES = "cpu_kernels.places"


def attention(
    before: Attention,
    call: Call,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    options: AttentionOptions | None,
) -> Tensor:
    """Compute attention with a kernel if there is one for the arguments, else with ``before``. See ``miles_embedded.Attention``."""
    if options is None and kernels.takes(query, key, value):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if isinstance(call, PackedCall) and call.longest <= PACKED_KEYS:
            return _attend_packed(call, q, k, v, scaling).unsqueeze(0)
        if isinstance(call, DecodeCall) and call.longest <= DECODED_KEYS and call.rows.parents is None:
            return _attend_cached(call, module.layer_idx, q, k, v, scaling).unsqueeze(0)
    return before(call, module, query, key, value, scaling, options)


def _attend_packed(call: PackedCall, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    tree = call.ctx.attached.get(_PLACES)
    if tree is None:
        tree = call.ctx.attached[_PLACES] = tree_of(call.packing)
    return kernels.tree_attention(q, k, v, tree, scaling)


def _attend_cached(call: DecodeCall, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    places = call.ctx.attached.get(_PLACES)
    if places is None:
        places = call.ctx.attached[_PLACES] = locate_rows(call.rows)
    cache = call.rows.cache
    k, v = k.contiguous(), v.contiguous()
    prompts = cache.prefixes.slabs["k", layer], cache.prefixes.slabs["v", layer]
    own_k, own_v = (cache.own.slab((kind, layer), x.shape[1], x.shape[2:], x) for kind, x in (("k", k), ("v", v)))
    return kernels.cached_attention(q.contiguous(), k, v, prompts, (own_k, own_v), places, scaling)


def tree_of(packing: Packing) -> kernels.Tree:
    """Convert a packing to a ``Tree``: the segments of each trunk, followed by its branches."""
    trunks, branches = packing.trunks, packing.branches
    far = np.stack([trunks.start, trunks.length], 1)
    alone = np.concatenate([np.zeros_like(far), far], 1)
    grown = np.concatenate([far[branches.trunk], np.stack([branches.start, branches.length], 1)], 1)
    family = np.concatenate([np.arange(len(trunks)), branches.trunk])
    order = np.argsort(family, kind="stable")
    first = np.searchsorted(family[order], np.arange(len(trunks) + 1))
    segments = np.concatenate([alone, grown])[order]
    return kernels.Tree(torch.from_numpy(segments), torch.from_numpy(first))


def locate_rows(rows: CachedRows) -> kernels.Cached:
    """Return the cache positions of a decode call's rows."""
    offsets = np.concatenate([[0], rows.counts.cumsum()])
    arrays = (offsets, rows.cache.prefix_of[rows.slots], rows.prefix_lengths, rows.slots, rows.before)
    return kernels.Cached(*(torch.from_numpy(np.ascontiguousarray(a, np.int64)) for a in arrays))
