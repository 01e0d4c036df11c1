"""Kernels of layers that keep a state: which ones may run."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable

from torch import nn

from miles_formats.gpu_kernel import miscompiles_delta_rule

log = logging.getLogger(__name__)


def choose_kernels(modules: Iterable[nn.Module]) -> None:
    """Choose the kernels of modules with a state, for the whole process.

    Transformers' functions for the gated delta rule use flash-linear-attention if it is installed; where Triton compiles it wrongly, they use torch.
    """
    if miscompiles_delta_rule():
        for module in modules:
            _use_torch(sys.modules[type(module).__module__].__dict__)


def _use_torch(functions: dict[str, object]) -> None:
    """Replace Transformers' functions for the gated delta rule by the torch functions that they wrap."""
    for name, function in [*functions.items()]:
        if "gated_delta_rule" in name and callable(function) and (own := inspect.unwrap(function)) is not function:
            functions[name] = own
            log.warning(
                "%s runs in torch, which is slower: with this version of Triton, flash-linear-attention computes wrong gradients on Hopper GPUs; "
                "3.7.1 is right",
                name,
            )
