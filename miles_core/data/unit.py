"""Data types of a weight sync.

A trainer yields ``Unit``s: full, unsharded tensors under their checkpoint names and in the checkpoint's layout, in a
deterministic order. Tensors that a number format must encode together (gate and up of one expert) share a unit. Core
encodes units with the run's format and hands ``Encoded`` to the transport.
"""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass
class Unit:
    """Tensors of the model copy, checkpoint name -> tensor. Their storage may be reused when the iterator advances, unless they are
    ``lasting``: views of the trainer's parameters, which keep their addresses and change only with the next training step."""

    tensors: dict[str, Tensor]
    lasting: bool = False


@dataclass
class Encoded:
    """One checkpoint tensor as stored: ``name`` is the plain name (``...q_proj.weight``), ``parts`` maps stored names
    (``...q_proj.weight``, ``...q_proj.weight_scale_inv``) to tensors, ``format`` is a format's name or "" for as is, ``lasting``
    as for ``Unit``. Who copies a part uses ``copy(to, part)``: as ``to.copy_(part)``, but what arrived from elsewhere may be checked in the
    same pass, and is in ``to`` when the stream was read to its end."""

    name: str
    parts: dict[str, Tensor] = field(default_factory=dict)
    format: str = ""
    lasting: bool = False
    copy: Callable[[Tensor, Tensor], object] = field(default=Tensor.copy_, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Number of bytes to transfer."""
        return sum([t.nbytes for t in self.parts.values()])

    def write(self, data: bytearray) -> None:
        """Append a process-independent encoding to ``data``: a description in JSON, followed by the tensors' bytes. It does not use
        pickle, which lacks the newer number types. Synchronises with the tensors' device."""
        parts = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in self.parts.items()
        ]
        head = json.dumps({"name": self.name, "format": self.format, "parts": parts}).encode()
        data += _HEAD.pack(len(head), self.nbytes) + head
        for tensor in self.parts.values():
            data += tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    @classmethod
    def read(cls, data: bytes | bytearray | memoryview) -> Iterator[Encoded]:
        """Inverse of ``write``, for any number of concatenated encodings. The tensors share memory with ``data``, which may be
        read-only: copy them, do not modify them."""
        view, start = memoryview(data), 0
        while start < len(view):
            head, body = _HEAD.unpack_from(view, start)
            start += _HEAD.size
            said = json.loads(bytes(view[start : start + head]))
            start += head
            parts = dict(_tensors(said["parts"], view[start : start + body]))
            start += body
            yield cls(said["name"], parts, said["format"])


#: Header: the sizes in bytes of the description and of the tensors.
_HEAD = struct.Struct("<QQ")


def _tensors(parts: Iterable[tuple[str, str, list[int]]], data: memoryview) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for name, kind, shape in parts:
        dtype = getattr(torch, kind)
        count = dtype.itemsize
        for size in shape:
            count *= size
        yield name, _as_tensor(np.asarray(data[start : start + count])).view(dtype).reshape(shape)
        start += count


def _as_tensor(piece: np.ndarray) -> Tensor:
    """Convert bytes to a tensor: a view if the address is aligned for every type, otherwise a copy."""
    aligned = piece if piece.ctypes.data % 16 == 0 else piece.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns about read-only memory, which is never written
        return torch.from_numpy(aligned)
