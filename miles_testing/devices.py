"""Devices of tests that run on a CPU, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

#: Parameters of a fixture: ``cpu``, and ``cuda`` with the marker ``gpu``.
DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
)
