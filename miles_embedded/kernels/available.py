"""Checks whether the Triton kernels run on a device."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

import torch

from miles_core.errors import first_line

log = logging.getLogger(__name__)


@cache
def kernels_run(device: torch.device) -> bool:
    """Whether kernels can be compiled and run there; the log says why they cannot."""
    if device.type != "cuda":
        return False
    if importlib.util.find_spec("triton") is None:
        log.info("Triton is not installed: steps that have a kernel are computed by torch")
        return False
    try:
        from miles_embedded.kernels.swiglu import swiglu

        swiglu(*torch.zeros(2, 1, 16, device=device, dtype=torch.bfloat16))
    except Exception as error:  # a missing compiler, an old driver, a GPU that Triton does not know
        log.warning("Triton cannot run here, so steps that have a kernel are computed by torch: %s", first_line(error))
        return False
    return True
