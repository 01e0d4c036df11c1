"""Tensors at an address, through DLPack: ``__cuda_array_interface__`` has no device, which torch then asks the driver for."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

#: Codes of DLPack for devices and for unsigned integers.
_DEVICES = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of DLPack."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """``DLManagedTensor`` of DLPack."""

    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


#: address of a description -> the description, and what keeps its memory alive, until the last tensor that uses it is freed.
_held: dict[int, tuple[Any, ...]] = {}


def _forget(address: int, held: dict[int, tuple[Any, ...]] = _held) -> None:
    held.pop(address, None)


_release = _Deleter(_forget)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_release))  # when the process ends, tensors may be freed after this module


def tensor_at(pointer: int, nbytes: int, device: torch.device, owner: object) -> Tensor:
    """Return [nbytes] uint8 at an address that ``device`` can read.

    Args:
        owner: kept alive as long as the tensor or a view of it.
    """
    shape = (ctypes.c_int64 * 1)(nbytes)
    tensor = _DLTensor(pointer, _DEVICES[device.type], device.index or 0, 1, _UNSIGNED, 8, 1, shape, None, 0)
    managed = _Managed(tensor, None, _release)
    address = ctypes.addressof(managed)
    _held[address] = (managed, shape, owner)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    found: Tensor = torch.from_dlpack(new(address, b"dltensor", None))  # type: ignore[attr-defined]
    return found
