"""When a number format's GPU kernel runs in place of its reference.

A format states its rule once, in tensor operations that run anywhere: the reference. It may also have a kernel that
reads a weight once and writes its codes, many times faster on a GPU. A kernel is only admissible when it returns the
same bytes as the reference for every input, so which of the two ran is never visible in a result; ``FormatContract``
compares them. Formats call ``usable`` for the choice; nothing else decides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from miles_core.precision.format import Format, Parts

#: Dtypes a kernel widens to FP32 while it reads; anything else is converted before.
READABLE = (torch.float32, torch.bfloat16, torch.float16)

_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


def usable(tensor: Tensor, capability: tuple[int, int] = (8, 0)) -> bool:
    """Whether a Triton kernel may read this tensor: on an NVIDIA GPU of at least this compute capability, with Triton
    installed, not empty, no gradient to record, and not inside ``reference_only``."""
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
    """Inside, every format runs its reference: what tests and benchmarks compare a kernel with."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def readable(tensor: Tensor) -> Tensor:
    """The tensor in a dtype a kernel reads, the same FP32 numbers."""
    return tensor if tensor.dtype in READABLE else tensor.float()


def room(format: Format, shape: tuple[int, int], device: torch.device, out: Parts | None) -> Parts:
    """Where a kernel writes a weight [N, K]: ``out`` where it can, else new tensors for ``store`` to copy from."""
    if out is not None and all(t.is_contiguous() and t.device == device for t in out.values()):
        return out
    return {s.suffix: torch.empty(s.shape, dtype=s.dtype, device=device) for s in format.storage(shape)}


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None
