"""Attention on a GPU that reads a query's keys in blocks of fixed positions, one after the other: for decoding, prompts and training.

A program attends the queries of one tile, all heads that share a key/value head, to the keys of their sequence. The keys are in two places,
the front (a prompt in the cache, or the trunk of a packed batch) and the sequence's own, and are read where they are. Blocks begin at
multiples of ``BLOCK`` positions and are added in order by the online softmax (Milakov and Gimelshein 2018). A block without a visible key
leaves a query's sums unchanged, so a query's result does not depend on the others in its tile. Keys are not divided among
programs, as Flash-Decoding does.

Tiles for decoding have few rows, others many. Both give the same bits: the scores, the weighted sums of values and the sums of the weights
are matrix products, which add the terms of the inner dimension in order whatever the tile (``kernels``; a sum over a tile's columns would add in an
order that depends on its layout), and no multiplication is contracted with an addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded import AttentionOptions

#: Keys of a block.
BLOCK = 64


class Tile(NamedTuple):
    """Queries times heads of a program, its warps, and its pipeline stages."""

    rows: int
    warps: int
    stages: int


#: Tiles for decoding, and for others by the largest head dimension; the last for every call.
_DECODE, _OTHERS, _WIDE = Tile(16, 4, 3), {128: Tile(128, 8, 3), 256: Tile(64, 4, 2)}, Tile(16, 4, 1)
#: Entries of a tile's record; see ``Tiles``.
FIELDS = 6


@dataclass(frozen=True)
class Place:
    """Where keys or values are.

    Attributes:
        store: the tensor; its last dimension is contiguous.
        slot, head, row: elements between slots, between heads and between successive positions.
    """

    store: Tensor
    slot: int
    head: int
    row: int

    @classmethod
    def of_slab(cls, slab: Tensor) -> Place:
        """Of a cache slab [slots, heads, width, dim]."""
        return cls(slab, slab.stride(0), slab.stride(1), slab.stride(2))

    @classmethod
    def of_rows(cls, x: Tensor) -> Place:
        """Of packed rows [rows, heads, dim]; a slot is the row where a sequence begins."""
        return cls(x, x.stride(0), x.stride(1), x.stride(0))

    @property
    def strides(self) -> tuple[int, int, int]:
        """Slot, head and row."""
        return self.slot, self.head, self.row


# fmt: off
@triton.jit
def _first_key(query, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first position that the queries at these positions attend to."""
    first = query * 0
    if WINDOW > 0:
        first = tl.maximum(first, query + 1 - WINDOW)
    if CHUNK > 0:
        first = tl.maximum(first, query // CHUNK * CHUNK)
    return first


@triton.jit
def _score(x, key, seen, scaling, cap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scores [TILE, BLOCK] of queries and keys, -inf where a query does not attend."""
    score = tl.dot(x, tl.trans(key), input_precision="ieee") * scaling
    if CAPPED:
        score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)
    return tl.where(seen, score, -float("inf"))


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, front_keys, front_values, own_keys, own_values, sinks, out, sums, tiles, scaling, cap, rows,
    q_row, q_head, fk_slot, fk_head, fk_row, fv_slot, fv_head, fv_row, ok_slot, ok_head, ok_row, ov_slot, ov_head, ov_row,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, AT_ONCE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, SUMS: tl.constexpr,
    FIELDS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * FIELDS
    kv_head, part = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
    row, count, position, front = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    front_slot, own_slot = tl.load(tile + 4), tl.load(tile + 5)

    member, dim, value_dim = tl.arange(0, TILE), tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    query, shared_head = member // AT_ONCE, part * AT_ONCE + member % AT_ONCE
    real, head = (query < count) & (shared_head < SHARED), kv_head * SHARED + shared_head
    place, last = row + query, position + query
    of_query = q + place[:, None] * q_row + head[:, None] * q_head + dim[None, :]
    x = tl.load(of_query, mask=real[:, None] & (dim[None, :] < DIM), other=0.0)
    first, low, end = _first_key(last, WINDOW, CHUNK), _first_key(position, WINDOW, CHUNK), position + count
    fk, fv = front_keys + front_slot * fk_slot + kv_head * fk_head, front_values + front_slot * fv_slot + kv_head * fv_head
    ok, ov = own_keys + own_slot * ok_slot + kv_head * ok_head, own_values + own_slot * ov_slot + kv_head * ov_head

    highest, result = tl.full([TILE], -float("inf"), tl.float32), tl.zeros([TILE, BLOCK_VALUE], tl.float32)
    ones = tl.full([BLOCK, 16], 1.0, own_values.dtype.element_ty)
    totals = tl.zeros([TILE, 16], tl.float32)  # equal columns: no product is narrower
    for start in range(low // BLOCK * BLOCK, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        known, near = at < end, at < front
        source = tl.where(near, fk + at * fk_row, ok + (at - front) * ok_row)
        key = tl.load(source[:, None] + dim[None, :], mask=known[:, None] & (dim[None, :] < DIM), other=0.0)
        seen = (at[None, :] <= last[:, None]) & (at[None, :] >= first[:, None]) & known[None, :]
        score = _score(x, key, seen, scaling, cap, CAPPED)
        now = tl.maximum(highest, tl.max(score, 1))
        level = tl.where(now == -float("inf"), 0.0, now)  # no visible key so far
        before, weight = tl.exp(highest - level), tl.exp(score - level[:, None])
        source = tl.where(near, fv + at * fv_row, ov + (at - front) * ov_row)
        value = tl.load(source[:, None] + value_dim[None, :], mask=known[:, None] & (value_dim[None, :] < VALUE_DIM), other=0.0)
        weight, highest = weight.to(value.dtype), now
        totals = tl.dot(weight, ones, totals * before[:, None], input_precision="ieee")
        result = tl.dot(weight, value, result * before[:, None], input_precision="ieee")
    total = tl.max(totals, 1)
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        now = tl.maximum(highest, sink)
        before, highest = tl.exp(highest - now), now
        total, result = total * before + tl.exp(sink - now), result * before[:, None]
    target = out + (place[:, None] * (KV_HEADS * SHARED) + head[:, None]) * VALUE_DIM + value_dim[None, :]
    tl.store(target, (result / total[:, None]).to(out.dtype.element_ty), mask=real[:, None] & (value_dim[None, :] < VALUE_DIM))
    if SUMS:
        tl.store(sums + head.to(tl.int64) * rows + place, highest + tl.log(total), mask=real)

# fmt: on


def choose_tile(dtype: torch.dtype, dim: int, value_dim: int, decodes: bool) -> Tile:
    """Choose the tile for queries of ``dtype`` and heads of ``dim`` entries, ``value_dim`` per value; ``decodes``: few queries per sequence.

    Rows of 40 and 24 bytes gave wrong results with several stages (Triton 3.6 on an H100), rows of whole 16 bytes did not.
    """
    if dtype == torch.float32 or dim % 8 or value_dim % 8:
        return _WIDE
    dim = max(dim, value_dim)
    if decodes:
        return _DECODE if dim <= 256 else _WIDE
    return next((tile for most, tile in _OTHERS.items() if dim <= most), _WIDE)


def queries_of(tile: Tile, heads: int, kv_heads: int) -> int:
    """Return the queries of a tile."""
    return tile.rows // min(tile.rows, triton.next_power_of_2(heads // kv_heads))


def attend_tiles(
    q: Tensor,
    keys: tuple[Place, Place],
    values: tuple[Place, Place],
    tiles: Tensor,
    scaling: float,
    tile: Tile,
    options: AttentionOptions | None = None,
    kv_heads: int = 1,
    sums: Tensor | None = None,
) -> Tensor:
    """Compute the attention of one layer, including the windows, chunks, caps and sinks of ``options``.

    Args:
        q: [rows, heads, dim], the last dimension contiguous.
        keys: of the front and of the sequences' own tokens.
        values: likewise.
        tiles: [tiles, FIELDS] int64, contiguous: first row of q, number of queries (at most ``queries_of``), position of the first, number
            of tokens in front, slot of the front, slot of the own tokens.
        scaling: factor on the scores.
        tile: see ``choose_tile``.
        options: see ``AttentionOptions``.
        kv_heads: number of key/value heads.
        sums: [heads, rows] FP32, receives the log of each query's sum of exponentials.

    Returns:
        [rows, heads, value dim] in the type of the values.
    """
    options = options or AttentionOptions()
    rows, heads, dim = q.shape
    value_dim, shared = values[1].store.shape[-1], heads // kv_heads
    out = values[1].store.new_empty(rows, heads, value_dim)
    constants = _constants(tile, shared, options) | {"DIM": dim, "VALUE_DIM": value_dim, "KV_HEADS": kv_heads}
    constants |= {"BLOCK_DIM": max(16, triton.next_power_of_2(dim))}
    constants |= {"BLOCK_VALUE": max(16, triton.next_power_of_2(value_dim)), "SUMS": sums is not None}
    places = (keys[0], values[0], keys[1], values[1])
    stores, strides = [place.store for place in places], [step for place in places for step in place.strides]
    sinks = q if options.sinks is None else options.sinks
    grid = len(tiles), kv_heads * triton.cdiv(shared, constants["AT_ONCE"])
    if len(tiles):
        numbers = (tiles, scaling, options.cap or 1.0, rows, q.stride(0), q.stride(1), *strides)
        _attend[grid](q, *stores, sinks, out, q if sums is None else sums, *numbers, **constants)
    return out


def _constants(tile: Tile, shared: int, options: AttentionOptions) -> dict[str, Any]:
    return {
        "SHARED": shared,
        "AT_ONCE": min(tile.rows, triton.next_power_of_2(shared)),
        "WINDOW": options.window,
        "CHUNK": options.chunk,
        "CAPPED": bool(options.cap),
        "SINKS": options.sinks is not None,
        "FIELDS": FIELDS,
        "TILE": tile.rows,
        "BLOCK": BLOCK,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": False,
    }
