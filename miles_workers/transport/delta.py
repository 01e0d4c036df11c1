"""Compressed difference between two versions of the same bytes.

An optimizer step changes a few per cent of the 16-bit words of BF16 weights, mostly in their lowest bits, so the XOR of two versions is
nearly all zeros. The non-zero words are stored as gaps between their positions and as values, split into byte planes (the high bytes are
again nearly all zeros), and compressed with Huffman coding only, because there are no repetitions to search for.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from miles_core.errors import SyncError

#: Number of changed words, and bytes per gap.
_HEAD = struct.Struct("<QQ")


def difference(new: Tensor, base: Tensor) -> bytes | None:
    """Compute the difference that turns ``base`` into ``new``.

    Args:
        new: [n] uint8 in host memory, n a multiple of 8.
        base: [n] uint8 in host memory.

    Returns:
        the difference, or None if it would not be smaller than ``new``.
    """
    changed = torch.bitwise_xor(new.view(torch.int64), base.view(torch.int64)).numpy()
    wide = np.flatnonzero(changed)
    words = changed[wide].view(np.uint16)
    at = np.flatnonzero(words)
    if len(at) * 3 > len(new):  # about three bytes per word before compression
        return None
    places = wide[at >> 2] * 4 + (at & 3)
    gaps = np.diff(places, prepend=0)
    width = max(int(gaps.max(initial=0)).bit_length() + 7, 8) // 8
    deflate = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    planes = [*_planes(gaps.astype(np.uint64), width), *_planes(words[at], 2)]
    return b"".join([_HEAD.pack(len(at), width), *map(deflate.compress, planes), deflate.flush()])


def apply(base: Tensor, data: bytes | memoryview) -> None:
    """Apply a difference to ``base`` in place, which becomes the ``new`` of ``difference``.

    Raises:
        SyncError: ``data`` is not a valid difference for this size.
    """
    try:
        count, width = _HEAD.unpack_from(data)
        planes = np.frombuffer(zlib.decompress(memoryview(data)[_HEAD.size :]), np.uint8).reshape(width + 2, count)
        places = np.cumsum(_numbers(planes[:width], np.uint64))
        words = base.view(torch.int16).numpy().view(np.uint16)
        words[places] ^= _numbers(planes[width:], np.uint16)
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise SyncError(f"a difference between two versions of the weights cannot be read: {error}") from error


def _planes(numbers: np.ndarray, width: int) -> list[bytes]:
    """Return the lowest bytes of all numbers, then the second lowest, and so on."""
    columns = numbers.astype(numbers.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, numbers.itemsize)
    return [columns[:, i].tobytes() for i in range(width)]


def _numbers(planes: np.ndarray, kind: type[np.unsignedinteger]) -> np.ndarray:
    """Invert ``_planes``."""
    columns = np.zeros((planes.shape[1], np.dtype(kind).itemsize), np.uint8)
    columns[:, : len(planes)] = planes.T
    return columns.reshape(-1).view(kind)
