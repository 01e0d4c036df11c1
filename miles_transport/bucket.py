"""Buckets: encoded tensors laid flat into one piece of memory, and the message that says what lies where.

The same bytes whatever the memory is, so a bucket has one checksum on both sides. A message is plain data: ``units``, one
``[name, format, [[stored name, dtype, shape, offset], ...]]`` for each tensor, ``nbytes`` and ``checksum`` of the bucket's bytes,
and ``memory``, how the receiver gets at them (``sync.inbox``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from miles_core.data.unit import Encoded
from miles_core.errors import SyncError
from miles_core.precision.format import Stored
from miles_transport.checksum import BLOCK, summing

#: A lasting tensor of host memory starts as many bytes behind one as it does behind a multiple of this, a line of the cache: matrix
#: products round by where their operands begin, and who computes with a tensor in a bucket gets the sender's results.
LINE = 64


def rounded(nbytes: int) -> int:
    """``nbytes``, rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def room_of(unit: Encoded) -> int:
    """Bytes that a tensor takes in an empty bucket."""
    return sum(rounded(_behind(unit, t) + t.numel() * t.element_size()) for t in unit.parts.values())


class Bucket:
    """A piece of memory that is filled with tensors, sent, and filled again.

    Args:
        buffer: [nbytes] uint8, nbytes a multiple of ``BLOCK``; everything that was not written must be the same at every sync.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self._views = buffer, Views(buffer)
        self._given: dict[tuple[str, int], _Given] = {}
        self.clear()

    def clear(self) -> None:
        """Start anew; the bytes stay until they are written over."""
        self.units: list[list[Any]] = []
        self.end = 0
        self._sum = summing(self.buffer)
        self._rooms: dict[str, dict[str, tuple[Tensor, int]]] = {}

    @property
    def filled(self) -> Tensor:
        """The bytes in use, whole blocks."""
        return self.buffer[: rounded(self.end)]

    @property
    def awaits(self) -> bool:
        """Whether there is room that was given away and not added yet."""
        return bool(self._rooms)

    def room(self, name: str, stored: Mapping[str, Stored]) -> dict[str, Tensor] | None:
        """Tensors in the bucket to write an encoded weight into before it is added; None where it does not fit."""
        given = self._given.get((name, self.end))
        if given is None or given.stored is not stored:
            start = self.end
            places = self._places({part: (s.dtype, s.shape, 0) for part, s in stored.items()})
            if places is None:
                return None
            given = _Given(stored, places, {part: tensor for part, (tensor, _) in places.items()}, self.end)
            self._given[name, start] = given
        self._rooms[name], self.end = given.places, given.end
        return given.tensors

    def add(self, unit: Encoded) -> bool:
        """Copy a tensor in, or find it in its room already; False where it does not fit."""
        places = self._rooms.pop(unit.name, None)
        if places is None or not all(_is(unit.parts[part], tensor) for part, (tensor, _) in places.items()):
            places = self._places({part: (t.dtype, tuple(t.shape), _behind(unit, t)) for part, t in unit.parts.items()})
            if places is None:
                return False
            for part, (tensor, at) in places.items():
                self._sum.copy(tensor, unit.parts[part], at, unit.lasting)
        self._sum.up_to(rounded(self.end))
        parts = [[part, dtype_name(t.dtype), list(t.shape), offset] for part, (t, offset) in places.items()]
        self.units.append([unit.name, unit.format, parts])
        return True

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
            found[part] = (self._views(dtype, shape, start), start)
            end += rounded(behind + size)
        self.end = min(end, len(self.buffer))
        return found


@dataclass(frozen=True)
class _Given:
    """Room that was given once, which is given again where the same tensor begins at the same place, as at every sync, as a rule."""

    stored: Mapping[str, Stored]
    places: dict[str, tuple[Tensor, int]]
    tensors: dict[str, Tensor]
    end: int


def unpacked(message: Mapping[str, Any], flat: Tensor) -> Iterator[Encoded]:
    """The tensors of a message, as views of the bucket's bytes. They are checked while they are read: what comes before the end may
    be wrong.

    Raises:
        SyncError: the bytes are not those that were sent; known at the end.
    """
    nbytes = message["nbytes"]
    if len(flat) < nbytes:
        raise SyncError(f"a bucket of {nbytes} bytes of weights arrived as {len(flat)} bytes")
    found, start = summing(flat[:nbytes]), flat.data_ptr()

    def copy(to: Tensor, source: Tensor) -> None:
        at = source.data_ptr() - start
        if 0 <= at < nbytes:
            found.copy(to, source, at, stays=True)
        else:  # the receiver put it elsewhere
            to.copy_(source)

    views = Views(flat)
    for name, format, parts in message["units"]:
        tensors = {part: views(getattr(torch, dtype), shape, offset) for part, dtype, shape, offset in parts}
        yield Encoded(name, tensors, format, copy=copy)
        found.up_to(rounded(max([offset + tensors[part].nbytes for part, _, _, offset in parts], default=0)))
    check(message, found.of(nbytes))


def check(message: Mapping[str, Any], found: int) -> None:
    """Raise SyncError where this is not the checksum of a message."""
    if found != message["checksum"]:
        first = message["units"][0][0] if message["units"] else "nothing"
        raise SyncError(
            f"the bucket of weights that starts with {first} arrived with checksum {found:016x}, and {message['checksum']:016x} was sent"
        )


def _is(part: Tensor, place: Tensor) -> bool:
    """Whether a part was written into its place."""
    return part is place or part.data_ptr() == place.data_ptr()


class Views:
    """Tensors that lie in ``flat``, bytes [n], in one step each: there may be thousands of them."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._as: dict[torch.dtype, tuple[Tensor, int]] = {}

    def __call__(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
        """One that begins ``offset`` bytes behind the start, a multiple of the dtype's."""
        size = dtype.itemsize
        if dtype not in self._as:
            whole = self._flat[: len(self._flat) // size * size].view(dtype)
            self._as[dtype] = whole, int(whole.storage_offset())  # as_strided counts from the storage's beginning
        whole, start = self._as[dtype]
        return whole.as_strided(shape, _strides(shape), start + offset // size)


def _strides(shape: Sequence[int]) -> list[int]:
    found, stride = [], 1
    for size in reversed(shape):
        found.append(stride)
        stride *= size
    return found[::-1]


def _behind(unit: Encoded, tensor: Tensor) -> int:
    """Bytes behind a block's start where a tensor of a unit is put."""
    return tensor.data_ptr() % LINE if unit.lasting and not tensor.is_cuda else 0


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """As messages say it."""
    return str(dtype).removeprefix("torch.")
