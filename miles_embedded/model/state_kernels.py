"""Kernels of layers that keep a state: which ones may run, and how precisely they compute."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable

import torch
from torch import nn

from miles_formats.gpu_kernel import miscompiles_delta_rule

log = logging.getLogger(__name__)


def choose_kernels(modules: Iterable[nn.Module]) -> None:
    """Choose the kernels of modules with a state, for the whole process.

    Convolutions in FP32 get FP32 products: by default PyTorch lets cuDNN round their inputs to TF32, and a token that is scored would then differ
    from the same token when it is generated. Transformers' functions for the gated delta rule use flash-linear-attention if it is installed;
    where Triton compiles it wrongly, they use torch.
    """
    for module in modules:
        if next(module.parameters()).is_cuda:
            torch.backends.cudnn.allow_tf32 = False
        if miscompiles_delta_rule():
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
