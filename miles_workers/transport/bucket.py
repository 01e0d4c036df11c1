"""Buckets: encoded tensors packed into one block of memory, and a message that describes their layout.

The bytes do not depend on the kind of memory, so a bucket has the same checksum on both sides. A message is plain data: ``units``,
a ``[name, format, [[stored name, dtype, shape, offset], ...]]`` per tensor; ``nbytes`` and ``checksum`` of the bucket's bytes; and
``memory``, which tells the receiver how to access them (``arrivals``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from miles_core.data.weight_unit import Encoded
from miles_core.errors import SyncError
from miles_core.precision.format import Stored
from miles_workers.transport.checksum import BLOCK, make_sum

#: A lasting tensor in host memory keeps its address modulo this many bytes (a cache line) in the bucket. The rounding of matrix products
#: depends on the alignment of the operands, so computing with the tensor in the bucket gives the same results as the sender's.
LINE = 64


def round_to_blocks(nbytes: int) -> int:
    """Round ``nbytes`` up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def room_of(unit: Encoded) -> int:
    """Return the bytes that a tensor needs in an empty bucket."""
    return sum(round_to_blocks(_block_offset(unit, t) + t.numel() * t.element_size()) for t in unit.parts.values())


class Bucket:
    """Memory that is filled with tensors, sent, and filled again.

    Args:
        buffer: [nbytes] uint8, nbytes a multiple of ``BLOCK``. Bytes that are never written must be the same at every sync.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self._views = buffer, Views(buffer)
        self._given: dict[tuple[str, int], _Given] = {}
        self.clear()

    def clear(self) -> None:
        """Remove all tensors; the bytes remain until they are overwritten."""
        self.units: list[list[Any]] = []
        self.end = 0
        self._sum = make_sum(self.buffer)
        self._rooms: dict[str, dict[str, tuple[Tensor, int]]] = {}

    @property
    def filled(self) -> Tensor:
        """The bytes in use, in whole blocks."""
        return self.buffer[: round_to_blocks(self.end)]

    @property
    def awaits(self) -> bool:
        """Whether a tensor returned by ``room`` has not been added yet."""
        return bool(self._rooms)

    def reserve(self, name: str, stored: Mapping[str, Stored]) -> dict[str, Tensor] | None:
        """Reserve tensors in the bucket for an encoded weight, to be written before ``add``; None if they do not fit."""
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
        """Add a tensor, copying it unless it is already in its reserved room; False if it does not fit."""
        places = self._rooms.pop(unit.name, None)
        if places is None or not all(_is_same(unit.parts[part], tensor) for part, (tensor, _) in places.items()):
            places = self._places(
                {part: (t.dtype, tuple(t.shape), _block_offset(unit, t)) for part, t in unit.parts.items()}
            )
            if places is None:
                return False
            for part, (tensor, at) in places.items():
                self._sum.copy(tensor, unit.parts[part], at, unit.lasting)
        self._sum.up_to(round_to_blocks(self.end))
        parts = [[part, dtype_name(t.dtype), list(t.shape), offset] for part, (t, offset) in places.items()]
        self.units.append([unit.name, unit.format, parts])
        return True

    def header(self) -> dict[str, Any]:
        """Return the message about the added tensors, without its memory."""
        nbytes = round_to_blocks(self.end)
        return {"units": self.units, "nbytes": nbytes, "checksum": self._sum.of(nbytes)}

    def fill(self, nbytes: int) -> None:
        """Fill ``nbytes`` with noise instead of tensors, to test whether and how fast buckets arrive."""
        self.clear()
        self.end = nbytes
        self.filled.random_()

    def _places(
        self, wanted: dict[str, tuple[torch.dtype, tuple[int, ...], int]]
    ) -> dict[str, tuple[Tensor, int]] | None:
        """Allocate tensors for all of ``wanted`` (part -> dtype, shape, offset from the start of a block); returns part -> (tensor,
        offset), or None if they do not fit."""
        found, end = {}, self.end
        for part, (dtype, shape, lead) in wanted.items():
            start, size = end + lead, prod(shape) * dtype.itemsize
            if start + size > len(self.buffer):
                return None
            found[part] = (self._views(dtype, shape, start), start)
            end += round_to_blocks(lead + size)
        self.end = min(end, len(self.buffer))
        return found


@dataclass(frozen=True)
class _Given:
    """Reserved room. It is reused if the same tensor starts at the same offset again, as in most syncs."""

    stored: Mapping[str, Stored]
    places: dict[str, tuple[Tensor, int]]
    tensors: dict[str, Tensor]
    end: int


def unpack(message: Mapping[str, Any], flat: Tensor) -> Iterator[Encoded]:
    """Yield the tensors of a message as views of the bucket's bytes. The checksum is verified after the last one; earlier tensors may
    be corrupt.

    Raises:
        SyncError: the bytes differ from those sent; raised at the end.
    """
    nbytes = message["nbytes"]
    if len(flat) < nbytes:
        raise SyncError(f"a bucket of {nbytes} bytes of weights arrived as {len(flat)} bytes")
    found, start = make_sum(flat[:nbytes]), flat.data_ptr()

    def copy(to: Tensor, source: Tensor) -> None:
        at = source.data_ptr() - start
        if 0 <= at < nbytes:
            found.copy(to, source, at, stays=True)
        else:  # the receiver copied it elsewhere first
            to.copy_(source)

    views = Views(flat)
    for name, format, parts in message["units"]:
        tensors = {part: views(getattr(torch, dtype), shape, offset) for part, dtype, shape, offset in parts}
        yield Encoded(name, tensors, format, copy=copy)
        found.up_to(round_to_blocks(max([offset + tensors[part].nbytes for part, _, _, offset in parts], default=0)))
    check(message, found.of(nbytes))


def check(message: Mapping[str, Any], found: int) -> None:
    """Raise SyncError if ``found`` is not the checksum of the message."""
    if found != message["checksum"]:
        first = message["units"][0][0] if message["units"] else "nothing"
        raise SyncError(
            f"the bucket of weights that starts with {first} arrived with checksum {found:016x}, but {message['checksum']:016x} was sent"
        )


def _is_same(part: Tensor, place: Tensor) -> bool:
    """Whether a part was written directly to its place in the bucket."""
    return part is place or part.data_ptr() == place.data_ptr()


class Views:
    """Creates tensors as views of ``flat`` [n] uint8, each with a single call, because there may be thousands."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._as: dict[torch.dtype, tuple[Tensor, int]] = {}

    def __call__(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
        """Return the tensor that starts at byte ``offset``, a multiple of the dtype's size."""
        size = dtype.itemsize
        if dtype not in self._as:
            whole = self._flat[: len(self._flat) // size * size].view(dtype)
            self._as[dtype] = whole, int(whole.storage_offset())  # as_strided counts from the start of the storage
        whole, start = self._as[dtype]
        return whole.as_strided(shape, _strides(shape), start + offset // size)


def _strides(shape: Sequence[int]) -> list[int]:
    found, stride = [], 1
    for size in reversed(shape):
        found.append(stride)
        stride *= size
    return found[::-1]


def _block_offset(unit: Encoded, tensor: Tensor) -> int:
    """Return the offset from the start of a block for a tensor of a unit, see ``LINE``."""
    return tensor.data_ptr() % LINE if unit.lasting and not tensor.is_cuda else 0


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in messages."""
    return str(dtype).removeprefix("torch.")
