"""A block of host memory with weights, as a rank sends it to engines in other processes: tensors one after the other, and their table.

The table is plain data, ``[name, format, [[stored name, dtype, shape, offset], ...]]`` per weight. It does not use pickle, which lacks the newer
number types. Offsets are multiples of ``ALIGNMENT``, so a receiver uses the tensors where they are, and copies a block to a GPU in one piece.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_core.data.weight_unit import Encoded
from miles_core.errors import SyncError, WorkerLost

#: Maximum bytes of a block: large enough to amortise a message, small enough that packing, travelling and loading overlap.
ENOUGH = 128 << 20
#: Offsets of tensors are multiples of this many bytes, a cache line.
ALIGNMENT = 64
#: Iterations of the event loop after which a call has left this process: it passes through several tasks (``Workers``) before.
STARTING = 4

#: Description of the weights in a block.
Table = list[list[Any]]


def room_of(unit: Encoded) -> int:
    """Return the bytes that a weight takes in a block."""
    return sum(_round_up(tensor.nbytes) for tensor in unit.parts.values())


class WeightBlock:
    """Memory that is filled with weights. Weights on a GPU are copied asynchronously, to pinned memory.

    Args:
        nbytes: size in bytes.
        pinned: whether the memory is pinned.
    """

    def __init__(self, nbytes: int, pinned: bool = False) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._devices: set[torch.device] = set()
        self.table: Table = []
        self._end = 0

    @property
    def nbytes(self) -> int:
        """Its size, also while it is empty."""
        return len(self._memory)

    def clear(self) -> None:
        """Remove all weights."""
        self.table, self._end = [], 0

    def add(self, unit: Encoded) -> bool:
        """Copy a weight into the block; False if it does not fit. On a GPU its memory may change after the current stream's work so far."""
        if self._end + room_of(unit) > len(self._memory):
            return False
        parts = []
        for name, tensor in unit.parts.items():
            kind = str(tensor.dtype).removeprefix("torch.")
            parts.append([name, kind, list(tensor.shape), self._end])
            place = self._memory[self._end : self._end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach(), non_blocking=True)
            if tensor.is_cuda:
                self._devices.add(tensor.device)
            self._end += _round_up(tensor.nbytes)
        self.table.append([unit.name, unit.format, parts])
        return True

    def data(self) -> np.ndarray:
        """Return the bytes in use, uint8 [n], a view; waits for the copies from GPUs."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()
        return self._memory[: self._end].numpy()


class BlockSender:
    """Sends streams of weights in blocks. The receiver loads a block while the next one is packed.

    Args:
        nbytes: maximum bytes of a block; a larger weight gets a block of its own.
        share: see ``Workers.share``. If it returns the block itself, the receiver may keep that, and its memory is not used again.
        take: (number, table, shared data, version) -> sends a block; returns when it was loaded.
    """

    def __init__(
        self,
        nbytes: int,
        share: Callable[[np.ndarray], Any],
        take: Callable[[int, Table, Any, int], Awaitable[None]],
    ) -> None:
        self._nbytes, self._share, self._take = min(nbytes, ENOUGH), share, take
        self._spare: WeightBlock | None = None
        self._sending: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._sent = 0

    async def send(self, units: Iterable[Encoded], version: int) -> int:
        """Send all of ``units``; return the number of blocks when all were loaded.

        The stream is read to its end also after an error: other ranks may wait in its collectives.

        Raises:
            WorkerLost, SyncError: of the first block that could not be sent.
        """
        self._sent, self._error, block = 0, None, None
        try:
            for unit in units:
                if block is not None and not block.add(unit):
                    await self._send(block, version)
                    block = None
                if block is None:
                    block = self._empty_block(unit)
                    block.add(unit)
            if block is not None:
                await self._send(block, version)
            await self._finish_sending()
        finally:
            if self._sending is not None:
                self._sending.cancel()
                self._sending = None
        if self._error is not None:
            raise self._error
        return self._sent

    async def _send(self, block: WeightBlock, version: int) -> None:
        """Start to send a block once the previous one was loaded; it is shared while that is in progress."""
        if self._error is not None:
            self._reuse(block)
            return
        data, table = block.data(), block.table
        shared = self._share(data)
        if shared is not data:
            self._reuse(block)
        await self._finish_sending()
        if self._error is not None:
            return
        self._sending = asyncio.ensure_future(self._take(self._sent, table, shared, version))
        self._sent += 1
        for _ in range(STARTING):
            await asyncio.sleep(0)

    def _reuse(self, block: WeightBlock) -> None:
        """Keep a block of the usual size for the next one."""
        if block.nbytes == self._nbytes:
            block.clear()
            self._spare = block

    async def _finish_sending(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            try:
                await sending
            except (WorkerLost, SyncError) as error:
                self._error = error

    def _empty_block(self, unit: Encoded) -> WeightBlock:
        """Return a block with room for a weight."""
        if (needed := room_of(unit)) > self._nbytes:
            return WeightBlock(needed)
        spare, self._spare = self._spare, None
        if spare is not None:
            return spare
        return WeightBlock(self._nbytes, any(tensor.is_cuda for tensor in unit.parts.values()))


def read_block(table: Table, data: np.ndarray) -> Iterator[Encoded]:
    """Yield the weights of a block. The tensors share its memory, which may be read-only: copy them, do not modify them.

    Args:
        table: ``WeightBlock.table``.
        data: ``WeightBlock.data()``, possibly in other memory.
    """
    if data.ctypes.data % ALIGNMENT:
        data = _aligned(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns about read-only memory, which is never written
        whole = torch.from_numpy(data)
    for name, format, parts in table:
        yield Encoded(name, {part: _view(whole, *where) for part, *where in parts}, format)


def _view(whole: Tensor, kind: str, shape: Sequence[int], start: int) -> Tensor:
    dtype = getattr(torch, kind)
    return whole[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


def _aligned(data: np.ndarray) -> np.ndarray:
    """Return a copy at an aligned address."""
    memory = np.empty(len(data) + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    memory[start : start + len(data)] = data
    return memory[start : start + len(data)]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
