"""The tiles of ``attention_kernel`` for a call: which queries a program attends, and where their keys are.

The tiles of a call are the same for all its layers, and are computed once. Those of a step in static buffers are computed on the device, so
that a CUDA graph can contain them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from miles_core.plugin import ConfigError
from miles_embedded import AttentionOptions, Call, DecodeCall, PackedCall, PromptCall, StaticCall, StaticPromptCall
from miles_true_on_policy.attention_kernel import BLOCK, FIELDS, Place, attend_tiles, choose_tile, queries_of
from miles_true_on_policy.sequences import to_device

#: Key in ``Context.attached`` of a call's tiles, by queries per tile.
_TILES = "true_on_policy.tiles"


def attend_by_tiles(
    call: Call,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    options: AttentionOptions | None,
    sums: Tensor | None = None,
) -> Tensor:
    """Compute the attention of one layer on a GPU, and store keys and values if the call has a cache; see ``miles_embedded.Attention``, and
    ``attend_tiles`` for ``sums``."""
    q, k, v = (_with_plain_rows(x[0].transpose(0, 1)) for x in (query, key, value))
    heads, kv_heads = query.shape[1], key.shape[1]
    # a plain prompt comes before the first pass in static buffers, which may be recorded in a graph
    if not isinstance(call, (StaticCall, StaticPromptCall)):
        check_attention(heads, kv_heads, q.shape[2], v.shape[2], q.dtype, q.device)
    if isinstance(call, StaticCall):
        keys, values = (_of_slabs(*slabs) for slabs in call.append(module.layer_idx, key, value))
    else:
        keys = _places(call, "k", module.layer_idx, key, k)
        values = _places(call, "v", module.layer_idx, value, v)
    tile = choose_tile(query.dtype, query.shape[3], value.shape[3], isinstance(call, (StaticCall, DecodeCall)))
    tiles = _tiles(call, queries_of(tile, heads, kv_heads), query.device)
    return attend_tiles(q, keys, values, tiles, scaling, tile, options, kv_heads, sums)[None]


@cache
@torch.no_grad()
def check_attention(
    heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Try the kernel once for each shape of heads: against torch in FP64, and the tiles of decoding and of training against each other.

    Raises:
        ConfigError: they differ on this machine.
    """
    generator, rows = torch.Generator().manual_seed(0), 3 * BLOCK + 5
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    q, k, v = (torch.randn(rows, n, d, generator=generator).to(device, dtype) for n, d in shapes)
    found = []
    for decodes in (False, True):
        tile = choose_tile(dtype, dim, value_dim, decodes)
        step = queries_of(tile, heads, kv_heads)
        start = torch.arange(0, rows, step, device=device)
        none = torch.zeros_like(start)
        tiles = torch.stack([start, (rows - start).clamp(max=step), start, none, none, none], 1)
        keys, values = ((Place.of_rows(x), Place.of_rows(x)) for x in (k, v))
        found.append(attend_tiles(q, keys, values, tiles, dim**-0.5, tile, None, kv_heads))
    query, key, value = (x.transpose(0, 1)[None].double() for x in (q, k, v))
    grouped = heads != kv_heads
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)[0].transpose(0, 1)
    error = float((found[0] - expected).norm() / expected.norm())
    if not (error < (1e-4 if dtype == torch.float32 else 2e-2) and torch.equal(*found)):
        raise ConfigError(
            f"--true-on-policy-mode: attention with {heads} heads of {dim} entries ({value_dim} per value) has another result in decoding than in "
            f"training, or an error of {error:.2g}, on this GPU; give --device cpu, or leave the flag out"
        )


def _with_plain_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _places(call: Call, kind: str, layer: int, entries: Tensor, rows: Tensor) -> tuple[Place, Place]:
    """Where the front's and the own keys or values are: ``entries`` [1, heads, rows, dim], which are stored; ``rows`` are the same."""
    if isinstance(call, DecodeCall):
        cache = call.rows.cache
        shape = entries.shape[1], entries.shape[3:], entries
        own = cache.own.slab((kind, layer), *shape)
        call.rows.write(own, rows)
        return _of_slabs(cache.prefixes.slab((kind, layer), *shape), own)
    if isinstance(call, PromptCall):
        call.store(kind, layer, call.pad(rows).transpose(1, 2))
    if isinstance(call, StaticPromptCall):
        call.keep(kind, layer, rows)
    place = Place.of_rows(rows)
    return place, place


def _of_slabs(prompts: Tensor, own: Tensor) -> tuple[Place, Place]:
    return Place.of_slab(prompts), Place.of_slab(own)


def _tiles(call: Call, queries: int, device: torch.device) -> Tensor:
    found = call.ctx.attached.setdefault(_TILES, {})
    if queries not in found:
        found[queries] = _compute_tiles(call, queries, device)
    tiles: Tensor = found[queries]
    return tiles


def _compute_tiles(call: Call, queries: int, device: torch.device) -> Tensor:
    """The records of ``attend_tiles``."""
    if isinstance(call, StaticCall):
        one, each = torch.ones_like(call.slots), torch.arange(len(call.slots), device=device)
        prompts = call.per_token(call.prompt_lengths), call.per_token(call.prompt_slots)
        return torch.stack((each, one, call.positions, *prompts, call.slots), 1)
    if isinstance(call, StaticPromptCall):
        return _tiles_of_prompts(call.bounds, queries, len(call.positions))
    start, count, front, front_slot, own_slot, before = _segments(call)
    tiles = -(-count // queries)
    segment = np.repeat(np.arange(len(count)), tiles)
    offset = (np.arange(len(segment)) - np.repeat(tiles.cumsum() - tiles, tiles)) * queries
    records = np.empty((len(segment), FIELDS), np.int64)
    records[:, 0] = start[segment] + offset
    records[:, 1] = np.minimum(count[segment] - offset, queries)
    records[:, 2] = before[segment] + offset
    for field, values in ((3, front), (4, front_slot), (5, own_slot)):
        records[:, field] = values[segment]
    return to_device(records, device)


def _tiles_of_prompts(bounds: Tensor, queries: int, tokens: int) -> Tensor:
    """The records of packed prompts that start at ``bounds`` [prompts + 1]; as many as ``tokens`` may need, the others without queries."""
    start, length = bounds[:-1].long(), bounds.diff().long()
    tiles = (length + queries - 1) // queries
    ends = tiles.cumsum(0)
    tile = torch.arange(tokens // queries + len(length), device=bounds.device)
    prompt = torch.searchsorted(ends, tile, right=True).clamp(max=len(length) - 1)
    offset = (tile - (ends - tiles)[prompt]) * queries
    count = (length[prompt] - offset).clamp(0, queries)
    offset, first = torch.where(count > 0, offset, 0), start[prompt]
    return torch.stack((first + offset, count, offset, torch.zeros_like(tile), first, first), 1)


def _segments(call: Call) -> tuple[np.ndarray, ...]:
    """Of each run of queries of one sequence: its first row, number of rows, tokens in front, slots of the front and of its own tokens, and
    position of its first query."""
    if isinstance(call, DecodeCall) and call.rows.parents is None:
        held = call.rows
        count = np.asarray(held.counts, np.int64)
        front = np.asarray(held.prefix_lengths, np.int64)
        slots = np.asarray(held.slots, np.int64)
        return count.cumsum() - count, count, front, held.cache.prefix_of[slots], slots, front + held.before
    if isinstance(call, PromptCall):
        count = np.asarray(call.lengths, np.int64)
        start, none = count.cumsum() - count, np.zeros_like(count)
        return start, count, none, start, start, none
    if isinstance(call, PackedCall):
        trunks, branches = call.packing.trunks, call.packing.branches
        start = np.concatenate([trunks.start, branches.start])
        count = np.concatenate([trunks.length, branches.length])
        front = np.concatenate([np.zeros_like(trunks.length), trunks.length[branches.trunk]])
        front_slot = np.concatenate([trunks.start, trunks.start[branches.trunk]])
        return start, count, front, front_slot, start, front
    kind = "a tree of drafts" if isinstance(call, DecodeCall) else type(call).__name__
    raise ConfigError(f"--true-on-policy-mode has no attention for {kind}; decode without drafting trees")
