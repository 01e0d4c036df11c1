"""Checksums of weights, with which a sync proves that the engine computes with what was sent.

The sender computes a checksum of every tensor that it encodes, and the engine one of the same tensor in the memory that it computes with.
Both refer to the decoded values in the dtype that the engine holds, so fused parameters, number formats and shared memory need no special
case: every path from one side to the other preserves these bytes.

Reading all weights once costs little next to a sync, which moves them. Per tensor, however, there is a fixed cost, and large models have
ten thousands of them. A version of more than ``WHOLE`` bytes or ``MANY`` tensors is therefore compared in ``PERIOD`` parts, one per sync;
the first sync of a connection compares everything.

Codes of a repeated encoding (``Codec.repeat``) are in memory that both sides may share. The checksums of some are therefore those of weights
that were encoded again from the trainer's memory: all of them once, later another part at each sync.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple
from weakref import ReferenceType, ref
from zlib import crc32

import torch
from torch import Tensor

from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.precision.codec import Codec
from miles_formats.gpu_kernel import runs_kernels
from miles_workers.transport.checksum import checksum_of, checksums_of

#: Versions of up to this many bytes and tensors (per rank) are compared completely at every sync.
WHOLE, MANY = 1 << 30, 1 << 10
#: Bytes of tensors whose checksums are computed together; they stay in memory until then.
_TOGETHER = 1 << 28
#: Number of syncs within which every tensor of a larger version is compared.
PERIOD = 8


class Checksums:
    """Collects checksums of named tensors; those on a GPU are read in one go."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self._launched: list[tuple[list[str], Tensor]] = []
        self._waiting: dict[str, Tensor] = {}
        self._nbytes = 0

    def add(self, name: str, tensor: Tensor, stays: bool = False) -> None:
        """Add a tensor. If it ``stays`` unchanged until ``launch``, it is summed together with others; otherwise its memory may change after
        this returns."""
        if not stays or not runs_kernels(tensor):
            found = checksum_of(tensor)
            if isinstance(found, Tensor):
                self._launched.append(([name], found))
            else:
                self._found[name] = found
            return
        if self._waiting and next(iter(self._waiting.values())).device != tensor.device:
            self.launch()
        self._waiting[name] = tensor
        self._nbytes += tensor.nbytes
        if self._nbytes >= _TOGETHER:
            self.launch()

    def launch(self) -> None:
        """Compute the checksums of all tensors added so far, whose memory may change afterwards."""
        waiting, self._waiting, self._nbytes = self._waiting, {}, 0
        if waiting:
            self._launched.append(([*waiting], checksums_of([*waiting.values()])))

    def read(self) -> dict[str, int]:
        """Return name -> checksum."""
        self.launch()
        launched, self._launched = self._launched, []
        if launched:
            names = [name for each, _ in launched for name in each]
            sums = torch.cat([each for _, each in launched]).tolist()
            self._found |= {name: value % (1 << 64) for name, value in zip(names, sums, strict=True)}
        return dict(self._found)


#: Shape, dtype and device of a tensor.
Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


def allocate_values(kinds: Sequence[Kind]) -> list[Tensor]:
    """Allocate a tensor of each kind; equal ones together, because an allocation takes longer than a view."""
    alike = {
        kind: iter(torch.empty((count, *kind[0]), dtype=kind[1], device=kind[2]).unbind(0))
        for kind, count in Counter(kinds).items()
    }
    return [next(alike[kind]) for kind in kinds]


@cache
def _number(name: str) -> int:
    """Return a number that assigns a tensor to one of the parts that are compared in turn."""
    return crc32(name.encode())


class _Again(NamedTuple):
    """A unit of a repeated encoding, the trainer's weight, the dtype of its values, and whether they are computed from that weight instead of the
    codes."""

    unit: Encoded
    source: Tensor
    dtype: torch.dtype
    checked: bool


class SentWeights:
    """The checksums of what one rank sent last.

    Args:
        codec: decodes what it encoded.
        dtypes: returns the dtype in which the engine holds each tensor of an update; tensors that it does not name are not compared.
    """

    def __init__(self, codec: Codec, dtypes: Callable[[], Mapping[str, torch.dtype]]) -> None:
        self._codec, self._load_dtypes = codec, dtypes
        self._dtypes: Mapping[str, torch.dtype] | None = None
        self._sums = Checksums()
        self._version: int | None = None
        self._count = self._nbytes = self._tensors = 0
        self._period = 1
        self._repeated: tuple[ReferenceType[Encoded], int] | None = None
        self._again: list[_Again] = []
        self._again_nbytes = 0

    def watch(self, units: Iterator[Encoded], version: int) -> Iterator[Encoded]:
        """Yield ``units`` unchanged, and compute the checksums of those that are compared in this sync. A stream that is never read, as
        that of a version that was staged before, leaves the checksums as they are."""
        all_again: bool | None = None
        for number, unit in enumerate(units):
            if number == 0:
                self._begin(version)
            self._nbytes += unit.nbytes
            self._tensors += 1
            if all_again is None and unit.source is not None:
                all_again = self._is_first(unit, version)
            turn = _number(unit.name) + self._count
            if unit.source is not None and (all_again or turn % self._period == 0):
                self._add_again(unit, all_again or turn % (PERIOD * self._period) == 0)
            elif unit.source is None and turn % self._period == 0:
                self._add(unit)
            yield unit
        self._compute_again()
        self._sums.launch()

    def checksums(self) -> dict[str, int]:
        """Return checkpoint name -> checksum, of the tensors of the last version that are compared."""
        return self._sums.read()

    def _begin(self, version: int) -> None:
        if self._version is not None and self._version != version:
            self._period = 1 if self._nbytes <= WHOLE and self._tensors <= MANY else PERIOD
            self._count += 1
        self._version, self._nbytes, self._tensors, self._sums = version, 0, 0, Checksums()
        self._again, self._again_nbytes = [], 0

    def _find_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype in which the engine holds a tensor; None if it is not compared."""
        if self._dtypes is None:
            self._dtypes = self._load_dtypes()
        return self._dtypes.get(name)

    @torch.no_grad()
    def _add(self, unit: Encoded) -> None:
        dtype = self._find_dtype(unit.name)
        if dtype is not None:
            held = self._codec.decode(unit)
            value = held.to(dtype)
            # decoded or converted values are in memory of their own
            self._sums.add(unit.name, value, stays=bool(unit.format) or unit.lasting or value is not held)

    def _is_first(self, unit: Encoded, version: int) -> bool:
        """Whether ``version`` is the first one of a repeated encoding, whose first unit is ``unit``."""
        known = self._repeated and self._repeated[0]()
        if self._repeated is None or known is not unit:
            self._repeated = ref(unit), version
        return self._repeated[1] == version

    def _add_again(self, unit: Encoded, checked: bool) -> None:
        """Add a weight whose codes a repeated encoding wrote. checked: encode it again to check that."""
        dtype, source = self._find_dtype(unit.name), unit.source
        if dtype is None or source is None:
            return
        self._again.append(_Again(unit, source, dtype, checked))
        self._again_nbytes += source.numel() * dtype.itemsize
        if self._again_nbytes >= _TOGETHER:
            self._compute_again()

    @torch.no_grad()
    def _compute_again(self) -> None:
        """Add the values of all waiting units of a repeated encoding, decoded together."""
        waiting, self._again, self._again_nbytes = self._again, [], 0
        checked = (WeightUnit({each.unit.name: each.source}, True) for each in waiting if each.checked)
        fresh = {each.name: each for each in self._codec.encode(checked)}
        values = allocate_values([(each.source.shape, each.dtype, each.source.device) for each in waiting])
        self._codec.decode_all([fresh.get(each.unit.name, each.unit) for each in waiting], values)
        for each, value in zip(waiting, values, strict=True):
            self._sums.add(each.unit.name, value, stays=True)
