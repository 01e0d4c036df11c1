"""Checksums of weights, with which a sync proves that the engine computes with what was sent.

The sender computes a checksum of every tensor that it encodes, and the engine one of the same tensor in the memory that it computes with.
Both refer to the decoded values in the dtype that the engine holds, so fused parameters, number formats and shared memory need no special
case: every path from one side to the other preserves these bytes.

Reading all weights once costs little next to a sync, which moves them. Per tensor, however, there is a fixed cost, and large models have
ten thousands of them. A version of more than ``WHOLE`` bytes or ``MANY`` tensors is therefore compared in ``PERIOD`` parts, one per sync;
the first sync of a connection compares everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from zlib import crc32

import torch
from torch import Tensor

from miles_core.data.weight_unit import Encoded
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
        self._found: dict[str, int | Tensor] = {}
        self._waiting: dict[str, Tensor] = {}
        self._nbytes = 0

    def add(self, name: str, tensor: Tensor, stays: bool = False) -> None:
        """Add a tensor. If it ``stays`` unchanged until ``launch``, it is summed together with others; otherwise its memory may change after
        this returns."""
        if not stays or not runs_kernels(tensor.detach()):
            self._found[name] = checksum_of(tensor)
            return
        if self._waiting and next(iter(self._waiting.values())).device != tensor.device:
            self.launch()
        self._found[name], self._waiting[name] = 0, tensor
        self._nbytes += tensor.nbytes
        if self._nbytes >= _TOGETHER:
            self.launch()

    def launch(self) -> None:
        """Compute the checksums of all tensors added so far, whose memory may change afterwards."""
        waiting, self._waiting, self._nbytes = self._waiting, {}, 0
        if waiting:
            self._found |= zip(waiting, checksums_of([*waiting.values()]).split(1), strict=True)

    def read(self) -> dict[str, int]:
        """Return name -> checksum."""
        self.launch()
        pending = {name: value for name, value in self._found.items() if isinstance(value, Tensor)}
        if pending:
            values = torch.cat(list(pending.values())).tolist()
            self._found |= {name: value % (1 << 64) for name, value in zip(pending, values, strict=True)}
        return {name: int(value) for name, value in self._found.items()}


@cache
def _number(name: str) -> int:
    """Return a number that assigns a tensor to one of the parts that are compared in turn."""
    return crc32(name.encode())


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

    def watch(self, units: Iterator[Encoded], version: int) -> Iterator[Encoded]:
        """Yield ``units`` unchanged, and compute the checksums of those that are compared in this sync. A stream that is never read, as
        that of a version that was staged before, leaves the checksums as they are."""
        for number, unit in enumerate(units):
            if number == 0:
                self._begin(version)
            self._nbytes += unit.nbytes
            self._tensors += 1
            if self._period == 1 or (_number(unit.name) + self._count) % self._period == 0:
                self._add(unit)
            yield unit
        self._sums.launch()

    def checksums(self) -> dict[str, int]:
        """Return checkpoint name -> checksum, of the tensors of the last version that are compared."""
        return self._sums.read()

    def _begin(self, version: int) -> None:
        if self._version is not None and self._version != version:
            self._period = 1 if self._nbytes <= WHOLE and self._tensors <= MANY else PERIOD
            self._count += 1
        self._version, self._nbytes, self._tensors, self._sums = version, 0, 0, Checksums()

    @torch.no_grad()
    def _add(self, unit: Encoded) -> None:
        if self._dtypes is None:
            self._dtypes = self._load_dtypes()
        dtype = self._dtypes.get(unit.name)
        if dtype is not None:
            held = self._codec.decode(unit)
            value = held.to(dtype)
            # decoded or converted values are in memory of their own
            self._sums.add(unit.name, value, stays=bool(unit.format) or unit.lasting or value is not held)
