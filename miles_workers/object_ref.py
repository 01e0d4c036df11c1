"""References to serialized objects, which processes pass on without reading them.

An ``ObjectRef`` holds a pickle and its large arrays as buffers. Between processes of one machine (``local_channel``) it travels as the descriptor
of anonymous shared memory (memfd_create(2)): the sender writes the buffers once, and processes on the way receive and send only the
descriptor. A process that reads the data maps it. The memory is freed when the last process that holds the reference drops it or ends, so a
process that dies takes nothing with it and leaves nothing. Other runtimes store objects in a store of their own.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

#: Arrays of at least this many bytes are stored next to the pickle.
SHARED = 16 << 10
#: Objects of fewer bytes are part of the message; memory of its own would take at least a page.
SMALL = 4 << 10
#: Advice of madvise(2) that maps all pages without copying them: a fault for each would take longer than the copy (Linux 5.14).
_POPULATE_READ = 22
#: Size of a buffer in shared memory.
_SIZE = struct.Struct(">Q")
#: Buffers of one ``writev``: IOV_MAX of Linux.
_PIECES = 1024


class Stored(Protocol):
    """A reference to a stored object."""

    def read(self) -> Any:
        """Return the deserialized object."""


class ObjectRef:
    """A reference to one serialized object.

    Args:
        buffers: the pickle, then its large arrays as bytes.
        descriptor: shared memory with these buffers and their sizes, which the reference closes; ``buffers`` is then empty.
    """

    def __init__(self, buffers: Sequence[np.ndarray], descriptor: int | None = None) -> None:
        self._buffers = list(buffers)
        self.descriptor = descriptor
        self._writing = threading.Lock()

    @classmethod
    def dump(cls, value: Any) -> ObjectRef:
        """Serialize an object. Arrays are not copied. Raises what pickle raises."""
        arrays: list[np.ndarray] = []
        data = pickle.dumps(
            value, 5, buffer_callback=take_large(lambda raw: arrays.append(np.frombuffer(raw, np.uint8)))
        )
        return cls([np.frombuffer(data, np.uint8), *arrays])

    def read(self) -> Any:
        """Return the deserialized object. Its large arrays are views of the buffers."""
        data, *arrays = self.buffers
        return pickle.loads(data.data, buffers=arrays)

    @property
    def buffers(self) -> list[np.ndarray]:
        """The buffers, uint8 [n] each."""
        if not self._buffers:
            assert self.descriptor is not None
            self._buffers = split_buffers(self.descriptor, self.sizes, whole=False)  # a reader may need few of them
        return self._buffers

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each buffer."""
        if self._buffers or self.descriptor is None:
            return tuple(len(buffer) for buffer in self._buffers)
        end = os.fstat(self.descriptor).st_size - _SIZE.size
        (count,) = _SIZE.unpack(os.pread(self.descriptor, _SIZE.size, end))
        sizes = os.pread(self.descriptor, count * _SIZE.size, end - count * _SIZE.size)
        return tuple(size for (size,) in _SIZE.iter_unpack(sizes))

    @property
    def shareable(self) -> bool:
        """Whether the object travels as a descriptor."""
        return self.descriptor is not None or (hasattr(os, "memfd_create") and sum(self.sizes) >= SMALL)

    def share(self) -> int:
        """Return the descriptor; the first call writes the buffers to shared memory."""
        with self._writing:
            if self.descriptor is None:
                sizes = [
                    _SIZE.pack(size) for size in (*self.sizes, len(self._buffers))
                ]  # so messages need not contain them
                self.descriptor = write_buffers(
                    [*(buffer.data for buffer in self._buffers), memoryview(b"".join(sizes))]
                )
            return self.descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectRef, (self.buffers,)

    def __del__(self) -> None:
        if getattr(self, "descriptor", None) is not None:
            with suppress(OSError):
                os.close(self.descriptor)  # type: ignore[arg-type]


def take_large(take: Callable[[memoryview], object]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return the callback for pickle that passes buffers of ``SHARED`` bytes or more to ``take`` instead of copying them."""

    def callback(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= SHARED:
            take(raw)
        return raw.nbytes < SHARED

    return callback


def write_buffers(buffers: Sequence[memoryview]) -> int:
    """Write buffers one after the other to new anonymous memory; return its descriptor. Raises OSError if memory is short."""
    memory = os.memfd_create("miles")
    try:
        left = [buffer for buffer in buffers if buffer.nbytes]
        while left:
            written = os.writev(memory, left[:_PIECES])
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if written:
                left[0] = left[0][written:]
    except BaseException:
        os.close(memory)
        raise
    return memory


def split_buffers(descriptor: int, sizes: Sequence[int], whole: bool = True) -> list[np.ndarray]:
    """Map memory that ``write_buffers`` wrote and return its buffers, uint8 [n] each. Changes of them are not visible to other
    processes. whole: map all pages at once."""
    mapped = mmap.mmap(descriptor, sum(sizes), mmap.MAP_PRIVATE)
    if whole:
        with suppress(OSError):  # an older kernel
            mapped.madvise(_POPULATE_READ)
    memory = np.frombuffer(mapped, np.uint8)
    ends = np.cumsum(sizes).tolist()
    return [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]
