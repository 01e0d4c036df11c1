"""Converts a checkpoint whose weights plugins change (``wrap_weights`` with the purpose ``convert``). The plugins receive the checkpoint as
a trainer would export it, one unit at a time. They receive it twice: on the meta device when the conversion is planned, which gives names,
shapes and dtypes without reading weights, and with the weights when it runs. The second stream is read in order, one unit at a time, while
earlier units are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from miles_core.checkpoint.hf_files import CheckpointFiles, Entry, code_of
from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import CheckpointError
from miles_core.precision.codec import Codec
from miles_formats.codec import find_coupled

Units = Callable[[], Iterator[WeightUnit]]
#: Wraps the stream of a checkpoint's weights with the plugins' functions.
Shape = Callable[[Units], Units]
Described = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class ShapedFiles:
    """A checkpoint with the plugins' changes; has the interface of ``CheckpointFiles``, but is read in a fixed order.

    Args:
        files: the checkpoint.
        codec: of the conversion; says which weights belong together.
        shape: composes the plugins' functions around a stream; called for each stream.

    Attributes:
        units: each unit's tensors in the order of the stream, name -> shape and dtype.
        entries: name -> tensor of the changed checkpoint.

    Raises:
        CheckpointError: two units hold the same name.
    """

    def __init__(self, files: CheckpointFiles, codec: Codec, shape: Shape) -> None:
        self.directory, self.config, self.files = files.directory, files.config, files.files
        self._sources, self._shape = (files, codec), shape
        self.units: list[Described] = [_describe(unit) for unit in self._open("meta")]
        self.entries: dict[str, Entry] = {}
        for unit in self.units:
            for name, (size, dtype) in unit.items():
                if name in self.entries:
                    raise CheckpointError(f"the plugins' wrap_weights yields {name} twice; each tensor is written once")
                nbytes = torch.Size(size).numel() * dtype.itemsize
                self.entries[name] = Entry(name, code_of(dtype), size, Path(), 0, nbytes)
        self._lock = Lock()
        self._stream: Iterator[WeightUnit] | None = None
        self._next = 0

    def _open(self, device: str) -> Iterator[WeightUnit]:
        return self._shape(partial(_units, *self._sources, device))()

    def begin(self, number: int) -> None:
        """Skip to this unit; units before it are not written."""
        with self._lock:
            while self._next < number:
                self._read()

    def take(self) -> WeightUnit:
        """The next unit, with its weights. Callable from several threads.

        Raises:
            CheckpointError: the stream differs from the one that was planned.
        """
        with self._lock:
            return WeightUnit(
                {name: tensor.clone() for name, tensor in self._read().tensors.items()}
            )  # its storage may be reused

    @torch.no_grad()
    def _read(self) -> WeightUnit:
        if self._stream is None:
            self._stream = self._open("cpu")
        unit = next(self._stream, WeightUnit({}))
        planned = self.units[self._next]
        if _describe(unit) != planned:
            raise CheckpointError(
                f"the plugins' wrap_weights yields {', '.join(unit.tensors) or 'nothing'} where it yielded {', '.join(planned)} when the "
                "conversion was planned on the meta device; names, shapes, dtypes and order must not depend on the weights"
            )
        self._next += 1
        return unit


def _describe(unit: WeightUnit) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in unit.tensors.items()}


def _units(files: CheckpointFiles, codec: Codec, device: str) -> Iterator[WeightUnit]:
    """The checkpoint's tensors in the order of its files, those that the format encodes together in one unit."""
    done: set[str] = set()
    for name in files.entries:
        if name in done:
            continue
        members = find_coupled(codec.format, name) if codec.format is not None else []
        together = [member for member in members if member in files.entries] or [name]
        done.update(together)
        yield WeightUnit({member: _tensor(files, member, device) for member in together})


def _tensor(files: CheckpointFiles, name: str, device: str) -> Tensor:
    entry: Any = files.entries[name]
    if device == "meta":
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    return files.read(name, None)
