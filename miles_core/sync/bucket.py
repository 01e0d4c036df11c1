"""Buckets: encoded tensors laid flat into one piece of memory, and the message that says what lies where.

The same bytes whatever the memory is, so a bucket has one checksum on both sides. A message is plain data: ``units``, one
``[name, format, [[stored name, dtype, shape, offset], ...]]`` for each tensor, ``nbytes`` and ``checksum`` of the bucket's bytes,
and ``memory``, how the receiver gets at them (``sync.inbox``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from miles_core.data.unit import Encoded
from miles_core.errors import SyncError
from miles_core.precision.format import Stored

#: Bytes a checksum adds up at a time; buckets are multiples of it, and tensors start behind a multiple of it.
BLOCK = 1024
#: A lasting tensor of host memory starts as many bytes behind one as it does behind a multiple of this, a line of the cache: matrix
#: products round by where their operands begin, and who computes with a tensor in a bucket gets the sender's results.
LINE = 64
#: Bytes that a CPU copies before it adds them up: they are in its cache still.
_PIECE = 1 << 20
#: Blocks whose numbers are made together.
_ROUND = 1 << 15
#: 2^64 divided by the golden ratio, odd: multiples of it lie far apart.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)


def rounded(nbytes: int) -> int:
    """``nbytes``, rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def room_of(unit: Encoded) -> int:
    """Bytes that a tensor takes in an empty bucket."""
    return sum(rounded(_behind(unit, t) + t.numel() * t.element_size()) for t in unit.parts.values())


def checksum(*pieces: Tensor) -> int:
    """Of bytes [n] uint8, n a multiple of ``BLOCK``, one piece after the other, on any device: the sums of their blocks as 64-bit
    words, each times an odd number of its own, added up; modulo 2^64.

    Reads memory once at the speed of a sum, and one number leaves the device. Finds any change of one word, and whatever is
    missing, late or in another block's place; not words that changed places within a block.
    """
    sums = torch.empty(sum(map(len, pieces)) // BLOCK, dtype=torch.int64, device=pieces[0].device)
    at = 0
    for piece in pieces:
        words = _blocks(piece)
        torch.sum(words, 1, out=sums[at : at + len(words)])
        at += len(words)
    return _weighed(sums)


def _blocks(flat: Tensor) -> Tensor:
    """Bytes as 64-bit words, a block a row."""
    return flat.view(torch.int64).view(-1, BLOCK // 8)


def _weighed(sums: Tensor) -> int:
    """The checksum of blocks with these sums [blocks]."""
    return int((sums * _weights(-(-len(sums) // _ROUND) * _ROUND, sums.device)[: len(sums)]).sum()) % (1 << 64)


@lru_cache(4)
def _weights(count: int, device: torch.device) -> Tensor:
    """An odd number for each of so many blocks."""
    return (2 * torch.arange(count, device=device) + 1) * _SPREAD


class _Sum:
    """The checksum of bytes [n] uint8 that are written or read from the first to the last one: on a CPU as they come, when they are in
    its cache, on a GPU all in one go at the end.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat, self._begun = flat, 0
        self._words = _blocks(flat[: len(flat) // BLOCK * BLOCK])
        self._sums = torch.empty(0 if flat.is_cuda else len(self._words), dtype=torch.int64)

    def up_to(self, end: int) -> None:
        """The bytes before ``end``, a multiple of ``BLOCK``, are there."""
        if not self._flat.is_cuda and end - self._begun >= _PIECE:
            self._add(end)

    def of(self, end: int) -> int:
        """The checksum of all bytes before ``end``."""
        if self._flat.is_cuda:
            return checksum(self._flat[:end])
        self._add(end)
        return _weighed(self._sums[: end // BLOCK])

    def _add(self, end: int) -> None:
        new = slice(self._begun // BLOCK, end // BLOCK)
        torch.sum(self._words[new], 1, out=self._sums[new])
        self._begun = end


class Bucket:
    """A piece of memory that is filled with tensors, sent, and filled again.

    Args:
        buffer: [nbytes] uint8, nbytes a multiple of ``BLOCK``; everything that was not written must be the same at every sync.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.clear()

    def clear(self) -> None:
        """Start anew; the bytes stay until they are written over."""
        self.units: list[list[Any]] = []
        self.end = 0
        self._sum = _Sum(self.buffer)
        self._rooms: dict[str, dict[str, tuple[Tensor, int]]] = {}

    @property
    def filled(self) -> Tensor:
        """The bytes in use, whole blocks."""
        return self.buffer[: rounded(self.end)]

    def room(self, name: str, stored: Mapping[str, Stored]) -> dict[str, Tensor] | None:
        """Tensors in the bucket to write an encoded weight into before it is added; None where it does not fit."""
        places = self._places({part: (s.dtype, s.shape, 0) for part, s in stored.items()})
        if places is None:
            return None
        self._rooms[name] = places
        return {part: tensor for part, (tensor, _) in places.items()}

    def add(self, unit: Encoded) -> bool:
        """Copy a tensor in, or find it in its room already; False where it does not fit."""
        places = self._rooms.pop(unit.name, None)
        if places is None or any(
            unit.parts[part].data_ptr() != tensor.data_ptr() for part, (tensor, _) in places.items()
        ):
            places = self._places({part: (t.dtype, tuple(t.shape), _behind(unit, t)) for part, t in unit.parts.items()})
            if places is None:
                return False
            for part, (tensor, at) in places.items():
                self._copy(unit.parts[part], tensor, at)
        self._sum.up_to(rounded(self.end))
        parts = [[part, dtype_name(t.dtype), list(t.shape), offset] for part, (t, offset) in places.items()]
        self.units.append([unit.name, unit.format, parts])
        return True

    def _copy(self, source: Tensor, to: Tensor, at: int) -> None:
        """Copy a tensor to its place at byte ``at``, a large one of a CPU piece by piece."""
        if to.nbytes < _PIECE or to.is_cuda or not source.is_contiguous():
            to.copy_(source)
            return
        for piece, place in zip(*(t.view(-1).split(_PIECE // t.itemsize) for t in (source, to)), strict=True):
            place.copy_(piece)
            at += place.nbytes
            self._sum.up_to(at // BLOCK * BLOCK)

    def header(self) -> dict[str, Any]:
        """The message about what was added so far, without its memory."""
        nbytes = rounded(self.end)
        return {"units": self.units, "nbytes": nbytes, "checksum": self._sum.of(nbytes)}

    def fill(self, nbytes: int) -> None:
        """With noise instead of tensors: a bucket that shows whether, and how fast, bytes arrive."""
        self.clear()
        self.end = nbytes
        self.filled.random_()

    def _places(
        self, wanted: dict[str, tuple[torch.dtype, tuple[int, ...], int]]
    ) -> dict[str, tuple[Tensor, int]] | None:
        """part -> a tensor in the bucket and its offset, for all of ``wanted`` (part -> dtype, shape, bytes behind a block's start) or
        for none."""
        found, end = {}, self.end
        for part, (dtype, shape, behind) in wanted.items():
            start, size = end + behind, prod(shape) * dtype.itemsize
            if start + size > len(self.buffer):
                return None
            found[part] = (self.buffer[start : start + size].view(dtype).view(shape), start)
            end += rounded(behind + size)
        self.end = min(end, len(self.buffer))
        return found


def unpacked(message: Mapping[str, Any], flat: Tensor) -> Iterator[Encoded]:
    """The tensors of a message, as views of the bucket's bytes. They are checked while they are read: what comes before the end may
    be wrong.

    Raises:
        SyncError: the bytes are not those that were sent; known at the end.
    """
    nbytes = message["nbytes"]
    if len(flat) < nbytes:
        raise SyncError(f"a bucket of {nbytes} bytes of weights arrived as {len(flat)} bytes")
    found = _Sum(flat[:nbytes])
    for name, format, parts in message["units"]:
        tensors = {part: view(flat, dtype, shape, offset) for part, dtype, shape, offset in parts}
        found.up_to(rounded(max((offset + tensors[part].nbytes for part, _, _, offset in parts), default=0)))
        yield Encoded(name, tensors, format)
    check(message, found.of(nbytes))


def check(message: Mapping[str, Any], found: int) -> None:
    """Raise SyncError where this is not the checksum of a message."""
    if found != message["checksum"]:
        first = message["units"][0][0] if message["units"] else "nothing"
        raise SyncError(
            f"the bucket of weights that starts with {first} arrived with checksum {found:016x}, and {message['checksum']:016x} was sent"
        )


def view(flat: Tensor, dtype: str, shape: list[int], offset: int) -> Tensor:
    """A tensor that lies in ``flat`` from a byte on."""
    kind: torch.dtype = getattr(torch, dtype)
    return flat[offset : offset + prod(shape) * kind.itemsize].view(kind).view(shape)


def _behind(unit: Encoded, tensor: Tensor) -> int:
    """Bytes behind a block's start where a tensor of a unit is put."""
    return tensor.data_ptr() % LINE if unit.lasting and not tensor.is_cuda else 0


def dtype_name(dtype: torch.dtype) -> str:
    """As messages say it."""
    return str(dtype).removeprefix("torch.")
