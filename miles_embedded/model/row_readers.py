"""Connects modules that compute rows with the layer that reads them, so that one kernel computes both the rows and a second form that the
layer needs. A module has at most one reader. The reader decides at every call whether it needs the second form, and identifies it by the
tensor of rows. If it receives another tensor, because of a hook or another order of layers, results do not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.kernels.epilogue import RowEpilogue

#: (shape [M, K], dtype) of rows -> what their kernel stores as well, or None.
Reader = Callable[[tuple[int, int], torch.dtype], RowEpilogue | None]
_ATTRIBUTE = "miles_row_reader"


def set_reader(module: nn.Module, reader: Reader | None) -> None:
    """Make ``reader`` the reader of the rows that ``module`` computes; None removes it."""
    module.__dict__.pop(_ATTRIBUTE, None)
    if reader is not None:
        module.__dict__[_ATTRIBUTE] = reader


def find_epilogue(module: nn.Module, shape: tuple[int, int], dtype: torch.dtype) -> RowEpilogue | None:
    """Return what the kernel of the rows [M, K] of ``module`` has to store as well; None if it has a gradient or no such reader."""
    reader: Reader | None = module.__dict__.get(_ATTRIBUTE)
    return None if reader is None or torch.is_grad_enabled() or 0 in shape else reader(shape, dtype)


def epilogue_of(module: nn.Module, x: Tensor) -> RowEpilogue | None:
    """Return ``find_epilogue`` for rows like x [..., K]."""
    if _ATTRIBUTE not in module.__dict__:
        return None
    return find_epilogue(module, (x.numel() // x.shape[-1], x.shape[-1]), x.dtype)


def compute_rows(module: nn.Module, operation: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
    """Return ``operation(x, *others)``, rows like x [..., K], and store what their reader needs; the operation accepts an epilogue."""
    epilogue = epilogue_of(module, x)
    return operation(x, *others) if epilogue is None else operation(x, *others, epilogue)


def accepts_epilogue(operation: Callable[..., Tensor]) -> bool:
    """Whether the last parameter of an operation is ``epilogue``."""
    return list(inspect.signature(operation).parameters)[-1:] == ["epilogue"]
