"""Triton attention kernels for a decode step: queries attend to their row's prompt and own tokens, directly in the cache.

The keys of a row are divided into splits of one size (Dao et al. 2023, Flash-Decoding). A program handles one split of one query for
the query heads that share a key/value head; a second kernel merges the splits by their sums of exponentials. With many rows, which occupy the
GPU without splits, splits are larger. The result of a query depends neither on where its prompt ends nor on the number of queries of its row.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.blocks import cdiv, next_power_of_2
from miles_embedded.kernels.epilogue import RowEpilogue, end_of
from miles_embedded.kernels.overlap import overlap, release, wait
from miles_embedded.model.attention import AttentionOptions

#: Keys per loop iteration, the fewest keys per split, and the largest number of splits.
BLOCK, SPLIT, MOST_SPLITS = 32, 128, 64
#: Splits are doubled up to ``LARGE_SPLIT`` keys as long as there are ``ENOUGH_PROGRAMS``, which differ in length. Rows of at most ``SHORT`` keys
#: need fewer programs, and are not split then.
ENOUGH_PROGRAMS, LARGE_SPLIT = 3072, 1024
ENOUGH_SHORT, SHORT = 512, 512
#: Splits that a program merges at once. A constant, so that the order of additions does not depend on the batch.
AT_ONCE = 4
#: Warps and pipeline stages of a program.
WARPS, STAGES = 2, 3


class Rows(Protocol):
    """Tokens that each row attends to. All tensors are [rows] int64.

    Each row feeds ``queries`` tokens. They attend to the first ``prompt_lengths`` tokens of prompt slot ``prompt_slots``, then to the row's
    own first ``lengths`` tokens and, among those being fed, to the ones in front of them and themselves. ``longest`` is an upper bound on the
    tokens of any row.
    """

    queries: int

    prompt_slots: Tensor
    prompt_lengths: Tensor
    lengths: Tensor

    @property
    def longest(self) -> int: ...


# fmt: off
@triton.jit
def _append(  # type: ignore[no-untyped-def]
    fed, fed_head, fed_row, slab, query, row, length, width, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):
    """Store the entries of all heads of one fed token in its row's slot, after ``length`` tokens."""
    at = tl.arange(0, BLOCK)
    head, dim = at // DIM, at % DIM
    entry = tl.load(fed + head * fed_head + query * fed_row + dim, mask=head < HEADS)
    tl.store(slab + ((row * HEADS + head) * width + length) * DIM + dim, entry, mask=head < HEADS)


@triton.jit
def _append_row(  # type: ignore[no-untyped-def]
    key, value, keys, values, lengths, key_head, key_row, value_head, value_row, width,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    query = tl.program_id(0).to(tl.int64)
    row = query // QUERIES
    length = tl.load(lengths + row) + query % QUERIES
    if tl.program_id(1) == 0:
        _append(key, key_head, key_row, keys, query, row, length, width, HEADS, DIM, BLOCK)
    else:
        _append(value, value_head, value_row, values, query, row, length, width, HEADS, VALUE_DIM, BLOCK_VALUE)


@triton.jit
def _store_entry(fed, slab, at, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(slab + at, tl.load(fed + at, mask=at < DIM), mask=at < DIM)


@triton.jit
def _load_entries(  # type: ignore[no-untyped-def]
    prompts, own, fed, fed_row, position, prompt, known, seen, at, DIM: tl.constexpr, FED: tl.constexpr,
):
    """Load the entries [keys, DIM] at ``position``. The prompt comes first, then the row's own tokens in the cache, then the fed tokens."""
    place = tl.where(position < prompt, prompts + position * DIM, own + position * DIM)
    if FED:
        place = tl.where(position < known, place, fed + (position - known) * fed_row)
    return tl.load(place[:, None] + at[None, :], mask=seen[:, None] & (at[None, :] < DIM), other=0.0)


@triton.jit
def _first_visible(last, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    first = last * 0
    if WINDOW > 0:
        first = tl.maximum(first, last + 1 - WINDOW)
    if CHUNK > 0:
        first = tl.maximum(first, last // CHUNK * CHUNK)
    return first


@triton.jit
def _scores(rows, key, scaling, cap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    score = tl.dot(rows, tl.trans(key), input_precision="ieee") * scaling
    if CAPPED:
        score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)
    return score


@triton.jit
def _store_split(  # type: ignore[no-untyped-def]
    partial, sums, place, dim, highest, total, result, real, VALUE_DIM: tl.constexpr, DIRECT: tl.constexpr,
):
    if DIRECT:  # the only split: ``partial`` is the result
        result = (result / total[:, None]).to(partial.dtype.element_ty)
    else:
        tl.store(sums + place * 2, highest, mask=real)
        tl.store(sums + place * 2 + 1, total, mask=real)
    tl.store(partial + place[:, None] * VALUE_DIM + dim, result, mask=real[:, None] & (dim < VALUE_DIM))


@triton.jit
def _attend_split(  # type: ignore[no-untyped-def]
    q, fed_keys, fed_values, prompt_keys, prompt_values, own_keys, own_values, prompt_slots, prompt_lengths, own_lengths, partial, sums,
    scaling, cap, prompt_width, own_width, split_size, key_head, key_row, value_head, value_row,
    FED: tl.constexpr, QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, DIRECT: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    token, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, query = token // QUERIES, token % QUERIES
    prompt = tl.load(prompt_lengths + row)
    known = prompt + tl.load(own_lengths + row)  # tokens in the cache, which those being fed follow
    last = known + query  # position of the query
    if split * split_size > last:
        return  # the merge does not read this split
    first = _first_visible(last, WINDOW, CHUNK)
    of_prompts = (tl.load(prompt_slots + row) * KV_HEADS + kv_head) * prompt_width
    of_row = (row * KV_HEADS + kv_head) * own_width - prompt
    prompt_keys, prompt_values = prompt_keys + of_prompts * DIM, prompt_values + of_prompts * VALUE_DIM
    own_keys, own_values = own_keys + of_row * DIM, own_values + of_row * VALUE_DIM
    fed_keys += kv_head * key_head + row * QUERIES * key_row
    fed_values += kv_head * value_head + row * QUERIES * value_row

    head, dim, value_dim = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    if FED and split == last // split_size:  # one program stores the entries of its token
        _store_entry(fed_keys + query * key_row, own_keys + last * DIM, dim, DIM)
        _store_entry(fed_values + query * value_row, own_values + last * VALUE_DIM, value_dim, VALUE_DIM)
    real, query_head = head < SHARED, (token * KV_HEADS + kv_head) * SHARED + head
    rows = tl.load(q + query_head[:, None] * DIM + dim, mask=real[:, None] & (dim < DIM), other=0.0)
    highest, total = tl.full([BLOCK_HEADS], -float("inf"), tl.float32), tl.zeros([BLOCK_HEADS], tl.float32)
    result = tl.zeros([BLOCK_HEADS, BLOCK_VALUE], tl.float32)
    low = tl.maximum(split * split_size, first // BLOCK_KEYS * BLOCK_KEYS)
    for start in range(low, tl.minimum((split + 1) * split_size, last + 1), BLOCK_KEYS):
        position = start + tl.arange(0, BLOCK_KEYS)
        seen = (position >= first) & (position <= last)
        key = _load_entries(prompt_keys, own_keys, fed_keys, key_row, position, prompt, known, seen, dim, DIM, FED)
        score = tl.where(seen[None, :], _scores(rows, key, scaling, cap, CAPPED), -float("inf"))
        now = tl.maximum(highest, tl.max(score, 1))  # finite: every block of the loop contains a visible key
        before, weight = tl.exp(highest - now), tl.exp(score - now[:, None])
        value = _load_entries(
            prompt_values, own_values, fed_values, value_row, position, prompt, known, seen, value_dim, VALUE_DIM, FED,
        )
        total = total * before + tl.sum(weight, 1)
        result = result * before[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        highest = now
    place = query_head * tl.num_programs(2) + split
    _store_split(partial, sums, place, value_dim, highest, total, result, real, VALUE_DIM, DIRECT)


@triton.jit(do_not_specialize=["rows"])
def _merge_splits(  # type: ignore[no-untyped-def]
    partial, sums, sinks, out, prompt_lengths, own_lengths, split_size, splits, heads, rows, first, second,
    QUERIES: tl.constexpr, VALUE_DIM: tl.constexpr, SINKS: tl.constexpr, BLOCK_VALUE: tl.constexpr, AT_ONCE: tl.constexpr,
    STORE: tl.constexpr, OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    row_head = tl.program_id(0).to(tl.int64)
    token = row_head // heads
    row = token // QUERIES
    used = (tl.load(prompt_lengths + row) + tl.load(own_lengths + row) + token % QUERIES) // split_size + 1
    dim = tl.arange(0, BLOCK_VALUE)[None, :]  # two dimensions, as STORE expects
    known = dim < VALUE_DIM
    highest, total = tl.full([1, 1], -float("inf"), tl.float32), tl.zeros([1, 1], tl.float32)
    if SINKS:
        highest, total = total + tl.load(sinks + row_head % heads).to(tl.float32), total + 1.0
    result = tl.zeros([1, BLOCK_VALUE], tl.float32)
    for first_split in range(0, used, AT_ONCE):
        split = first_split + tl.arange(0, AT_ONCE)[:, None]
        at = row_head * splits + split
        peak = tl.load(sums + at * 2, mask=split < used, other=-float("inf"))
        share = tl.load(sums + at * 2 + 1, mask=split < used, other=0.0)
        part = tl.load(partial + at * VALUE_DIM + dim, mask=(split < used) & known, other=0.0)
        now = tl.maximum(highest, tl.max(peak, 0)[:, None])
        level = tl.where(now == -float("inf"), 0.0, now)  # no visible key so far
        before, weight = tl.exp(highest - level), tl.exp(peak - level)
        total = total * before + tl.sum(weight * share, 0)[:, None]
        result = result * before + tl.sum(weight * part, 0)[None, :]
        highest = now
    result = (result / total).to(out.dtype.element_ty)
    tl.store(out + row_head * VALUE_DIM + dim, result, mask=known)
    if STORE is not None:
        STORE(result.to(tl.float32), token, row_head % heads * VALUE_DIM, heads * VALUE_DIM, rows, first, second)

# fmt: on


def attend_rows(
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    call: Rows,
    scaling: float,
    options: AttentionOptions | None = None,
    epilogue: RowEpilogue | None = None,
    fed: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute the attention of one layer, including the windows, soft caps and sinks of ``options``.

    Args:
        q: [rows * queries, heads, dim], contiguous.
        keys: slabs of the prompts and of the rows, [slots, kv heads, width, dim], contiguous.
        values: slabs of the prompts and of the rows, [slots, kv heads, width, value dim], contiguous.
        call: tokens that each row attends to, including the query's own.
        scaling: factor on the scores.
        epilogue: stores the result [rows * queries, heads * value dim] in a second form, if that needs no more rows and whole heads.
        fed: keys and values of the tokens being fed, as ``append_rows`` takes them, to be stored as well; None if the slabs have them.

    Returns:
        [rows * queries, heads, value dim] in the type of the values.
    """
    options = options or AttentionOptions()
    rows, heads, dim = q.shape
    (prompt_keys, own_keys), (prompt_values, own_values) = keys, values
    kv_heads, value_dim = own_keys.shape[1], own_values.shape[3]
    size, splits = _split(call.longest, rows // call.queries * kv_heads)
    out = own_values.new_empty(rows, heads, value_dim)
    direct = splits == 1 and options.sinks is None and epilogue is None
    partial = out if direct else q.new_empty(rows, heads, splits, value_dim, dtype=torch.float32)
    sums = q.new_empty(rows, heads, splits, 2, dtype=torch.float32)
    wide: dict[str, Any] = {"QUERIES": call.queries, "VALUE_DIM": value_dim, "BLOCK_VALUE": _block(value_dim)}
    tokens = (call.prompt_slots, call.prompt_lengths, call.lengths)
    slabs = (prompt_keys, prompt_values, own_keys, own_values)
    numbers = (scaling, options.cap or 1.0, prompt_keys.shape[2], own_keys.shape[2], size)
    key, value = fed or (q, q)
    strides = (*key.stride()[1:3], *value.stride()[1:3]) if fed else (0, 0, 0, 0)
    heads_of = {"KV_HEADS": kv_heads, "SHARED": heads // kv_heads, "DIM": dim, "FED": fed is not None}
    constants = {**heads_of, **wide, **_constants(options, heads // kv_heads, dim), "DIRECT": direct, **overlap(q)}
    grid = (rows, kv_heads, splits)
    _attend_split[grid](q, key, value, *slabs, *tokens, partial, sums, *numbers, *strides, **constants)
    if not direct:
        _merge(partial, sums, out, call, size, wide, options.sinks, epilogue)
    return out


def _constants(options: AttentionOptions, shared: int, dim: int) -> dict[str, Any]:
    blocks = {"BLOCK_HEADS": _block(shared), "BLOCK_DIM": _block(dim), "BLOCK_KEYS": BLOCK}
    visible = {"WINDOW": options.window, "CHUNK": options.chunk, "CAPPED": bool(options.cap)}
    return {**blocks, **visible, "num_warps": WARPS, "num_stages": STAGES}


def _merge(
    partial: Tensor,
    sums: Tensor,
    out: Tensor,
    call: Rows,
    size: int,
    wide: dict[str, Any],
    sinks: Tensor | None,
    epilogue: RowEpilogue | None,
) -> None:
    """Merge the splits of ``size`` keys, ``partial`` [rows, heads, splits, value dim] with their ``sums`` [rows, heads, splits, 2], into ``out``."""
    rows, heads, splits, dim = partial.shape
    epilogue = epilogue if epilogue is not None and _fits(epilogue, rows, dim) else None
    _, store, memory = end_of(epilogue, rows, out)
    options = {**wide, "SINKS": sinks is not None, "AT_ONCE": AT_ONCE, "STORE": store, **overlap(out), "num_warps": 1}
    given = (partial, sums, sums if sinks is None else sinks, out, call.prompt_lengths, call.lengths)
    _merge_splits[(rows * heads,)](*given, size, splits, heads, rows, *memory, **options)
    if epilogue is not None:
        epilogue.finish(out.view(rows, -1))


def append_rows(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, queries: int = 1) -> None:
    """Append the keys and the values of each row's fed tokens to its slot.

    Args:
        key: [1, kv heads, rows * queries, dim], the last dimension contiguous.
        value: [1, kv heads, rows * queries, value dim], likewise.
        keys: slab of the rows, [slots, kv heads, width, dim], contiguous.
        values: likewise.
        lengths: [rows] int64 tokens that each row has.
        queries: tokens fed to each row.
    """
    heads, tokens, dim = key.shape[1:]
    blocks = {"QUERIES": queries, "DIM": dim, "BLOCK": next_power_of_2(heads * dim)}
    blocks |= {"VALUE_DIM": value.shape[3], "BLOCK_VALUE": next_power_of_2(heads * value.shape[3])}
    strides = (*key.stride()[1:3], *value.stride()[1:3])
    options = blocks | overlap(key)
    _append_row[(tokens, 2)](key, value, keys, values, lengths, *strides, keys.shape[2], HEADS=heads, **options)


def _fits(epilogue: RowEpilogue, rows: int, dim: int) -> bool:
    """Whether an epilogue needs no more than these rows, and heads of ``dim`` values are whole blocks of it."""
    return epilogue.rows == rows and dim % epilogue.tile == 0 and dim == _block(dim)


def _split(longest: int, programs: int) -> tuple[int, int]:
    """Return keys per split and number of splits for rows of at most ``longest`` tokens; ``programs`` is the number of rows times key/value
    heads."""
    if longest <= SHORT and programs >= ENOUGH_SHORT:
        return SHORT, 1
    size = SPLIT
    while MOST_SPLITS * size < longest or (
        size < LARGE_SPLIT and programs * cdiv(longest, 2 * size) >= ENOUGH_PROGRAMS
    ):
        size *= 2
    return size, cdiv(longest, size)


def _block(length: int) -> int:
    """Smallest block for ``length`` elements: a power of two, at least 16 as ``tl.dot`` requires."""
    return max(16, next_power_of_2(length))
