"""Matrix products of FP32 tensors in FP32."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)


def use_float32_products() -> None:
    """Make PyTorch compute products and convolutions of FP32 tensors in FP32, for the whole process.

    On a GPU they may be set to round their inputs to TF32, which has 10 bits of mantissa: cuDNN's convolutions by default, and matrix products
    by the environment variable TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which NVIDIA's containers set. The rounding errors depend on the shapes of a
    call, so an engine that generates and a trainer that scores the same tokens would differ, and routers would choose other experts.
    """
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        log.warning(
            "FP32 products were set to TF32 (by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, or by a program), with which engine and trainer would differ; "
            "they are computed in FP32"
        )
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
