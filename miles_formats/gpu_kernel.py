"""Selects between a number format's GPU kernel and its reference implementation.

A format has a reference implementation in tensor operations that run on every device. It may also have a GPU kernel, which reads a
weight once and writes its codes, many times faster. A kernel must return the same bytes as the reference for every input, so that
the choice never affects results; ``FormatContract`` compares both. Formats call ``runs_kernels`` to choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from packaging.version import Version
from torch import Tensor

if TYPE_CHECKING:
    from miles_core.precision.format import Format, Parts

#: Dtypes that a kernel converts to FP32 while reading; tensors of other dtypes are converted beforehand.
READABLE = (torch.float32, torch.bfloat16, torch.float16)

_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


def runs_kernels(tensor: Tensor, capability: tuple[int, int] = (8, 0)) -> bool:
    """Return whether to use a Triton kernel for this tensor: it is on an NVIDIA GPU of at least this compute capability, Triton is
    installed, the tensor is not empty and needs no gradient, and ``reference_only`` is not active."""
    if not tensor.is_cuda or _reference_only.get() or torch.version.hip is not None or tensor.numel() == 0:
        return False
    if tensor.requires_grad and torch.is_grad_enabled():
        return False
    return has_triton() and _capability(tensor.device) >= capability


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@contextmanager
def reference_only() -> Iterator[None]:
    """Context in which every format uses its reference implementation, for tests and benchmarks."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def convert_for_kernel(tensor: Tensor) -> Tensor:
    """Convert the tensor to a dtype that kernels read, without changing its FP32 values."""
    return tensor if tensor.dtype in READABLE else tensor.float()


def allocate_output(format: Format, shape: tuple[int, int], device: torch.device, out: Parts | None) -> Parts:
    """Return a kernel's output tensors for a weight [N, K]: ``out`` if possible, else new tensors that ``store`` copies to ``out``."""
    if out is not None and all(t.is_contiguous() and t.device == device for t in out.values()):
        return out
    return {s.suffix: torch.empty(s.shape, dtype=s.dtype, device=device) for s in format.storage(shape)}


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


@cache
def miscompiles_delta_rule() -> bool:
    """Return whether Triton compiles flash-linear-attention's kernels of the gated delta rule wrongly for the GPU of this machine.

    On Hopper, Triton 3.4.0 to 3.7.0 give wrong gradients (fla-org/flash-linear-attention#640). With Triton 3.6 on an H200 forward passes of
    random models gave NaN, too.
    """
    if not (torch.cuda.is_available() and has_triton()) or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability()[0] != 9:
        return False
    return Version("3.4") <= Version(metadata.version("triton")) < Version("3.7.1")
