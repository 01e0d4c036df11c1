"""Elementwise functions whose results do not depend on an element's position in its tensor.

PyTorch computes most elements of a tensor with vector instructions, and the last few, or the last few of each thread's share, one by one
with another implementation of the same function (``cpu_kernel_vec`` in ``aten/src/ATen/native/cpu/Loops.h``). For ``silu``, ``gelu``,
``sigmoid``, ``softplus``, ``pow`` and a bfloat16 ``rsqrt`` both differ in the last bit, so that a row depends on the number of rows and of
threads. Padding the tensor to shares of whole vectors avoids the second implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Elements of two vectors of 64 bytes, the step of PyTorch's vectorised loops, in the narrowest floating-point type.
_STEP = 64
#: Elements from which PyTorch divides a loop among threads (``at::internal::GRAIN_SIZE``).
_GRAIN = 32768


def whole_vectors(count: int, threads: int) -> int:
    """Round ``count`` up to a number of elements that ``threads`` threads divide into whole steps."""
    while True:
        share = _STEP * max(1, min(threads, -(-count // _GRAIN)))
        if count % share == 0:
            return count
        count += -count % share


def apply_aligned(function: Callable[..., Tensor], x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call an elementwise function of x [...] so that every element is computed by the vectorised loop.

    Functions of two tensors (the powers of rotary frequencies), and of no tensor, are called as they are.
    """
    alone = isinstance(x, Tensor) and not any(isinstance(other, Tensor) for other in args)
    if not alone or x.device.type != "cpu" or not x.is_floating_point():
        return function(x, *args, **kwargs)
    flat = x.contiguous().view(-1)
    more = whole_vectors(len(flat), torch.get_num_threads()) - len(flat)
    if not more:
        return function(flat, *args, **kwargs).view(x.shape)
    return function(pad(flat, (0, more)), *args, **kwargs)[: len(flat)].view(x.shape)
