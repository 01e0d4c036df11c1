"""Checks whether torch's scaled matrix product, ``torch.nn.functional.scaled_mm``, is available, for formats with native products.

The function passes block-scaled operands to cuBLAS, which supports each combination of block sizes on some GPUs only.
"""

from __future__ import annotations

import torch

from miles_core.precision.product import NoProduct
from miles_formats.gpu_kernel import has_triton


def need_scaled_mm(device: torch.device, dtype: torch.dtype, majors: range, cuda: tuple[int, int]) -> None:
    """Check that block-scaled products with BF16 results are available.

    Args:
        device: device of the operands.
        dtype: dtype of the result.
        majors: major compute capabilities that support the product.
        cuda: minimum version of CUDA, (major, minor).

    Raises:
        NoProduct: the product is unavailable; the message gives the reason.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        place = "an AMD GPU" if device.type == "cuda" else f"the {device.type}"
        raise NoProduct(f"it needs tensor cores of an NVIDIA GPU, and the model is on {place}")
    if dtype != torch.bfloat16:
        raise NoProduct(f"its results are bfloat16, and the model is {str(dtype).removeprefix('torch.')} (--dtype)")
    major, minor = torch.cuda.get_device_capability(device)
    if major not in majors:
        which = f"sm_{majors[0]}0" if len(majors) == 1 else f"sm_{majors[0]}0 or later"
        raise NoProduct(f"it needs {which}, and this GPU is sm_{major}{minor}")
    version = torch.version.cuda or "none"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < cuda:
        raise NoProduct(f"it needs torch built for CUDA {cuda[0]}.{cuda[1]} or later, and this one is for {version}")
    if not hasattr(torch.nn.functional, "scaled_mm"):
        raise NoProduct(f"it needs torch.nn.functional.scaled_mm, and torch {torch.__version__} has none")
    if not has_triton():
        raise NoProduct("its operands are quantised by a Triton kernel, and Triton is not installed")
