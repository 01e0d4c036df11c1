"""GPU memory that another process of the host can map, by handles of the CUDA driver.

Allocated by the driver itself: memory of torch's allocator may lie in a pool (expandable segments) that has no such handles, so
what is to be seen elsewhere is packed into memory of this kind.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from miles_core.errors import SyncError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class DeviceMemory:
    """GPU memory with a handle, freed by ``close``.

    Args:
        nbytes: its size.
        device: which GPU, ``cuda`` or ``cuda:N``.

    Attributes:
        buffer: [nbytes] uint8, zero at first, valid until ``close``.
        memory: where it is, as a message says it (``Inbox``).

    Raises:
        SyncError: the driver has not so much memory, or no handles.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._index = (
            torch.device(device).index if torch.device(device).index is not None else torch.cuda.current_device()
        )
        pointer, handle = ctypes.c_uint64(), _Handle()
        with torch.cuda.device(self._index):
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
        gpu = str(torch.cuda.get_device_properties(self._index).uuid)
        self.memory = {"kind": "device", "key": secrets.token_hex(8), "handle": data, "nbytes": nbytes, "gpu": gpu}

    def close(self) -> None:
        """Free it; the receivers' maps of it end with their processes or with the next sync."""
        with torch.cuda.device(self._index):
            torch.cuda.synchronize()
            _driver().cuMemFree_v2(self._pointer)


class _Mapped:
    """Memory of another process, unmapped with the last tensor on it."""

    def __init__(self, pointer: int, nbytes: int, index: int, foreign: bool) -> None:
        self._pointer, self._index, self._foreign = pointer, index, foreign
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}

    def __del__(self) -> None:
        if self._foreign:
            with torch.cuda.device(self._index):
                _driver().cuIpcCloseMemHandle(ctypes.c_uint64(self._pointer))


def attach(where: Mapping[str, Any]) -> Tensor:
    """The memory of another process's ``DeviceMemory``.

    Raises:
        SyncError: this process does not see that GPU, or the driver refuses.
    """
    if not torch.cuda.is_available():
        raise SyncError(f"weights lie on GPU {where['gpu']}, and the engine's process has no GPU")
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if where["gpu"] not in seen:
        raise SyncError(
            f"weights lie on GPU {where['gpu']}, which the engine's process does not see: it is on another host, or hidden by "
            "CUDA_VISIBLE_DEVICES"
        )
    index, pointer = seen[where["gpu"]], ctypes.c_uint64()
    handle = _Handle.from_buffer_copy(bytes.fromhex(where["handle"]))
    with torch.cuda.device(index):
        torch.cuda.current_stream().synchronize()
        what = "a handle of the trainer's GPU memory in the engine's process"
        _call(what, "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return _tensor(pointer.value, where["nbytes"], index, foreign=True)


def _tensor(pointer: int, nbytes: int, index: int, foreign: bool = False) -> Tensor:
    return torch.as_tensor(_Mapped(pointer, nbytes, index, foreign), device=f"cuda:{index}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(what: str, function: str, *arguments: Any) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        said = (name.value or b"unknown").decode()
        raise SyncError(f"the CUDA driver does not give {what} ({function}: {said})")
