"""The compact form of a routing record.

A record contains k of E expert indices for every token and MoE layer: 4 k bytes as int32, although a set of k out of E has only
log2 C(E, k) bits of information. There are two lossless codes:

- ``set``, if every row is in ascending order: the row's rank among all sets (combinatorial number system: experts c_1 < ... < c_k have the
  rank sum_i C(c_i, i)), in ceil(log2 C(E, k)) bits.
- ``list``, otherwise: the indices in their order, which determines the rounding of sums over experts, in ceil(log2 E) bits per expert.

The codes of a record are stored as their whole low bytes, followed by the remaining bits, packed. Rows without a record are -1 and take one
bit. A BLAKE2b digest covers header and body.
"""

from __future__ import annotations

import hashlib
import math
import struct
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.plugin import DataError

Codes = NDArray[np.uint64]

#: Header: magic, code, 1 if rows are missing, experts, tokens, layers, experts per token, digest.
_HEADER = struct.Struct("<3sBBHIHH16s")
_MAGIC = b"MR1"
LIST, SET = 0, 1


def encode(routes: NDArray[np.integer], experts: int) -> bytes:
    """Compact bytes of a record.

    Args:
        routes: [tokens, layers, k], each row k experts below ``experts``, or all -1.
        experts: E.

    Raises:
        DataError: another shape, an expert out of range, or a row that is -1 in part.
    """
    routes = np.asarray(routes)
    if routes.ndim != 3:
        raise DataError(f"a routing record has 3 dimensions (tokens, layers, experts a token), not {routes.ndim}")
    tokens, layers, k = routes.shape
    rows = routes.reshape(-1, k).astype(np.int64)
    missing = (rows < 0).all(1) if k else np.zeros(len(rows), bool)
    known = rows[~missing]
    if known.size and (known.min() < 0 or known.max() >= experts):
        raise DataError(
            f"a routing record holds expert {int(known.max() if known.max() >= experts else known.min())}, and the model has "
            f"{experts}; engine and trainer must run the same model"
        )
    code = SET if set_bits(experts, k) <= 63 and bool((np.diff(known, axis=1) > 0).all()) else LIST
    words, width = (_ranks(known, experts), set_bits(experts, k)) if code == SET else _listed(known, experts)
    body = np.packbits(missing, bitorder="little").tobytes() if missing.any() else b""
    body += b"".join(_pack(word, bits) for word, bits in zip(words, _widths(code, experts, k, width), strict=True))
    head = (_MAGIC, code, int(missing.any()), experts, tokens, layers, k)
    return _HEADER.pack(*head, _digest(head, body)) + body


def decode(payload: bytes) -> NDArray[np.int32]:
    """Inverse of ``encode``: [tokens, layers, k] int32.

    Raises:
        DataError: not a record, truncated, or its digest does not match.
    """
    if len(payload) < _HEADER.size or payload[:3] != _MAGIC:
        raise DataError(
            f"{len(payload)} bytes are not a routing record: it begins with {_MAGIC!r} and {_HEADER.size} bytes of header"
        )
    *head, digest = _HEADER.unpack_from(payload)
    _, code, partial, experts, tokens, layers, k = head
    body = payload[_HEADER.size :]
    if _digest(tuple(head), body) != digest:
        raise DataError(
            f"a routing record of {tokens} tokens does not match its digest ({len(body)} bytes after the header): it was "
            "truncated or changed on its way; the sample must be generated again"
        )
    count = tokens * layers
    missing = np.zeros(count, bool)
    at = 0
    if partial:
        at = -(-count // 8)
        missing = np.unpackbits(np.frombuffer(body, np.uint8, at), count=count, bitorder="little").astype(bool)
    present = int(count - missing.sum())
    words = []
    for bits in _widths(code, experts, k, set_bits(experts, k)):
        word, at = _unpack(body, at, present, bits)
        words.append(word)
    rows = np.full((count, k), -1, np.int32)
    rows[~missing] = _unranked(words[0], experts, k) if code == SET else _unlisted(words, experts, k)
    return rows.reshape(tokens, layers, k)


def set_bits(experts: int, k: int) -> int:
    """Bits of the ``set`` code for one row: ceil(log2 C(E, k))."""
    return max(math.comb(experts, k) - 1, 0).bit_length()


@lru_cache
def _binomials(experts: int, k: int) -> Codes:
    """[k + 1, experts + 1]: row i holds C(n, i), n ascending."""
    return np.array([[min(math.comb(n, i), 2**63) for n in range(experts + 1)] for i in range(k + 1)], np.uint64)


def _ranks(rows: NDArray[np.int64], experts: int) -> list[Codes]:
    table = _binomials(experts, rows.shape[1])
    rank = np.zeros(len(rows), np.uint64)
    for i in range(rows.shape[1]):
        rank += table[i + 1][rows[:, i]]
    return [rank]


def _unranked(rank: Codes, experts: int, k: int) -> NDArray[np.int32]:
    table = _binomials(experts, k)
    rows = np.empty((len(rank), k), np.int32)
    rest = rank.copy()
    for i in range(k, 0, -1):
        chosen = np.searchsorted(table[i], rest, side="right") - 1
        rows[:, i - 1] = chosen
        rest -= table[i][chosen]
    return rows


def _per_word(experts: int) -> tuple[int, int]:
    """Return (bits per expert, experts per 64-bit word)."""
    bits = max(experts - 1, 1).bit_length()
    return bits, 64 // bits


def _listed(rows: NDArray[np.int64], experts: int) -> tuple[list[Codes], int]:
    bits, fit = _per_word(experts)
    words = []
    for start in range(0, rows.shape[1], fit):
        piece = rows[:, start : start + fit].astype(np.uint64)
        word = np.zeros(len(rows), np.uint64)
        for i in range(piece.shape[1]):
            word |= piece[:, i] << np.uint64(bits * i)
        words.append(word)
    return words, 0


def _unlisted(words: list[Codes], experts: int, k: int) -> NDArray[np.int32]:
    bits, fit = _per_word(experts)
    mask = np.uint64((1 << bits) - 1)
    columns = [(words[i // fit] >> np.uint64(bits * (i % fit))) & mask for i in range(k)]
    return np.stack(columns, 1).astype(np.int32) if columns else np.zeros((0, 0), np.int32)


def _widths(code: int, experts: int, k: int, set_width: int) -> list[int]:
    """Return the number of bits of each word of a row."""
    if code == SET:
        return [set_width]
    bits, fit = _per_word(experts)
    return [bits * min(fit, k - start) for start in range(0, k, fit)]


def _pack(word: Codes, bits: int) -> bytes:
    """Pack the whole low bytes of each code, then the bits above them."""
    whole, rest = divmod(bits, 8)
    low = word.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :whole].tobytes()
    if not rest:
        return low
    high = (word >> np.uint64(8 * whole)).astype(np.uint8)
    planes = (high[:, None] >> np.arange(rest, dtype=np.uint8)) & 1
    return low + np.packbits(planes, bitorder="little").tobytes()


def _unpack(body: bytes, at: int, count: int, bits: int) -> tuple[Codes, int]:
    """Return (codes, offset of the next word)."""
    whole, rest = divmod(bits, 8)
    padded = np.zeros((count, 8), np.uint8)
    padded[:, :whole] = np.frombuffer(body, np.uint8, count * whole, at).reshape(count, whole)
    word = padded.view("<u8").reshape(-1).astype(np.uint64)
    at += count * whole
    if rest:
        size = -(-count * rest // 8)
        planes = np.unpackbits(np.frombuffer(body, np.uint8, size, at), count=count * rest, bitorder="little")
        high = (planes.reshape(count, rest).astype(np.uint64) << np.arange(rest, dtype=np.uint64)).sum(
            1, dtype=np.uint64
        )
        word |= high << np.uint64(8 * whole)
        at += size
    return word, at


def _digest(head: tuple[Any, ...], body: bytes) -> bytes:
    return hashlib.blake2b(_HEADER.pack(*head, bytes(16)) + body, digest_size=16).digest()
