"""GPU memory that other processes of the host can map, through handles of the CUDA driver.

``DeviceMemory`` is allocated by the driver directly: memory of torch's allocator may be part of a pool (expandable segments) without
such handles. For other memory, ``Loan`` lets another process read tensors in place.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_core.data.weight_unit import Encoded
from miles_core.errors import SyncError
from miles_workers.transport.bucket import Views, check, dtype_name
from miles_workers.transport.checksum import ALIGNED, BLOCK, Sum, make_read_sum, make_sum
from miles_workers.transport.tensor_at import tensor_at

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_STARTED = secrets.token_hex(8)


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class DeviceMemory:
    """GPU memory with a handle; free it with ``close``.

    Args:
        nbytes: size in bytes.
        device: the GPU, ``cuda`` or ``cuda:N``.

    Attributes:
        buffer: [nbytes] uint8, initially zero, valid until ``close``.
        memory: its description in messages (``Inbox``).

    Raises:
        SyncError: the driver has not enough memory, or does not support handles.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        pointer, handle = ctypes.c_uint64(), _Handle()
        with torch.cuda.device(self._index):
            # makes torch's context of this GPU current in this thread, which may not have used it yet
            torch.cuda.current_stream().synchronize()
            _call(f"{nbytes:,} bytes of GPU memory", "cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            self._pointer = pointer
            try:
                _call("a handle of GPU memory", "cuIpcGetMemHandle", ctypes.byref(handle), pointer)
            except SyncError:
                self.close()
                raise
            self.buffer = _tensor(pointer.value, nbytes, self._index)
            self.buffer.zero_()
        data = bytes(memoryview(handle).cast("B")).hex()
        where = _describe(data, nbytes, self._index, pointer.value or 0)
        self.memory = {"kind": "device", "key": secrets.token_hex(8), **where}

    def close(self) -> None:
        """Free the memory. Receivers unmap it at the end of their process or at the next sync."""
        with torch.cuda.device(self._index):
            torch.cuda.synchronize()
            _driver().cuMemFree_v2(self._pointer)


class Loan:
    """Tensors of torch's allocator that another process reads in place, without packing.

    Tensors can be lent if their memory has handles, is on one GPU and consists of whole blocks (``BLOCK``); copy others. Lent tensors
    must not change until the message is answered, and are kept alive until then.
    """

    def __init__(self) -> None:
        self._units: list[list[Any]] = []
        self._tensors: list[Tensor] = []
        self._regions: dict[str, dict[str, Any]] = {}
        self._sum: Sum | None = None
        self._device: torch.device | None = None
        self._last: dict[str, Any] | None = None
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._units)

    def add(self, name: str, tensor: Tensor) -> bool:
        """Lend an unencoded tensor; False if that is not possible."""
        nbytes, address = tensor.nbytes, tensor.data_ptr()
        if (
            not tensor.is_cuda
            or not tensor.is_contiguous()
            or not nbytes
            or nbytes % BLOCK
            or address % ALIGNED
            or self._device not in (None, tensor.device)
        ):
            return False
        region = self._last
        if region is None or not region["base"] <= address < region["base"] + region["nbytes"]:
            region = _region(tensor)
        if region is None:
            return False
        key, start = region["key"], address - region["base"]
        self._last = self._regions.setdefault(key, region)
        self._units.append([name, key, dtype_name(tensor.dtype), list(tensor.shape), start])
        self._tensors.append(tensor)
        self._nbytes += nbytes
        if self._sum is None:
            self._sum, self._device = make_read_sum(tensor), tensor.device
        self._sum.read(tensor)
        return True

    def message(self) -> dict[str, Any]:
        """Return the message for the lent tensors, at least one, with its memory, in the form of a bucket's message."""
        assert self._sum is not None
        return {
            "units": self._units,
            "nbytes": self._nbytes,
            "checksum": self._sum.of(self._nbytes),
            "memory": {"kind": "loan", "regions": self._regions},
        }


def read_loan(message: Mapping[str, Any], region: Callable[[str], Tensor]) -> Iterator[Encoded]:
    """Yield the tensors of a ``Loan``'s message. The checksum is verified after the last one; earlier tensors may be corrupt.

    Args:
        message: the message.
        region: key -> attached memory of a region.

    Raises:
        SyncError: the bytes differ from those lent; raised at the end.
    """
    found, at, views = None, 0, dict[str, Views]()
    for name, key, dtype, shape, start in message["units"]:
        if key not in views:
            views[key] = Views(region(key))
        tensor = views[key](getattr(torch, dtype), shape, start)
        piece = tensor.view(-1).view(torch.uint8)
        if found is None:
            found = make_sum(piece)
        else:
            found.append(piece)
        yield Encoded(name, {name: tensor}, copy=partial(found.copy, at=at, stays=True))
        at += tensor.nbytes
        found.up_to(at)
    if found is not None:
        check(message, found.of(at))


def _region(tensor: Tensor) -> dict[str, Any] | None:
    """Describe the allocation of a tensor, with its start address as ``base``; None if it has no handle."""
    number, address = ctypes.c_uint64(), tensor.data_ptr()
    if _driver().cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(address)):
        return None
    return _allocation(number.value, tensor.device.index, address)


@lru_cache(1 << 16)
def _allocation(number: int, index: int, address: int) -> dict[str, Any] | None:
    """``_region`` for an address on a GPU; ``number`` is the driver's unique id of the allocation."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    with torch.cuda.device(index):
        if _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)):
            return None
        if _driver().cuIpcGetMemHandle(ctypes.byref(handle), base):
            return None
    data = bytes(memoryview(handle).cast("B")).hex()
    return {"key": data, **_describe(data, size.value, index, base.value)}


def _describe(handle: str, nbytes: int, index: int, base: int) -> dict[str, Any]:
    """Describe an allocation for messages. Its own process cannot open the handle and uses the address instead."""
    return {
        "handle": handle,
        "nbytes": nbytes,
        "gpu": _uuid(index),
        "base": base,
        "process": _process(),
        "host": _host(),
    }


def _process() -> str:
    """Return a unique id of this process."""
    return f"{_STARTED}-{os.getpid()}"


@cache
def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


class _Mapped:
    """Memory of another process, unmapped when the last tensor that uses it is freed."""

    def __init__(self, pointer: int, nbytes: int, index: int, foreign: bool) -> None:
        self._pointer, self._index, self._foreign = pointer, index, foreign
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}

    def __del__(self) -> None:
        if self._foreign:
            with torch.cuda.device(self._index):
                _driver().cuIpcCloseMemHandle(ctypes.c_uint64(self._pointer))


def attach(where: Mapping[str, Any]) -> Tensor:
    """Map the memory of a ``DeviceMemory`` or a loan, of another process or this one.

    Memory of a GPU that CUDA_VISIBLE_DEVICES hides from this process is mapped for peer access by its current GPU, which is then the
    tensor's device (the CUDA driver supports that since version 10.1).

    Raises:
        SyncError: this process cannot access that GPU, or the driver refuses.
    """
    if not torch.cuda.is_available():
        raise SyncError(f"the weights are on GPU {where['gpu']}, but the engine's process has no GPU")
    seen = {_uuid(i): i for i in range(torch.cuda.device_count())}
    hidden = where["gpu"] not in seen
    if hidden and where["host"] != _host():
        raise SyncError(f"the weights are on GPU {where['gpu']} of another host, whose memory this host cannot map")
    index, pointer = torch.cuda.current_device() if hidden else seen[where["gpu"]], ctypes.c_uint64()
    if where["process"] == _process():
        return _tensor(where["base"], where["nbytes"], index)
    handle = _Handle.from_buffer_copy(bytes.fromhex(where["handle"]))
    what = "a handle of the trainer's GPU memory in the engine's process"
    if hidden:
        what += f", to which CUDA_VISIBLE_DEVICES does not show the GPU {where['gpu']}"
    with torch.cuda.device(index):
        torch.cuda.current_stream().synchronize()
        _call(what, "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    assert pointer.value is not None
    if not hidden:
        return _tensor(pointer.value, where["nbytes"], index, foreign=True)
    mapped = _Mapped(pointer.value, where["nbytes"], index, foreign=True)  # torch would look for the GPU of the pointer
    return tensor_at(pointer.value, where["nbytes"], torch.device("cuda", index), mapped)


def _tensor(pointer: int, nbytes: int, index: int, foreign: bool = False) -> Tensor:
    return torch.as_tensor(_Mapped(pointer, nbytes, index, foreign), device=f"cuda:{index}")


@cache
def _host() -> str:
    """Return an id of this host until it is started again."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else socket.gethostname()


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(what: str, function: str, *arguments: Any) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        text = (name.value or b"unknown").decode()
        raise SyncError(f"the CUDA driver did not provide {what} ({function}: {text})")
