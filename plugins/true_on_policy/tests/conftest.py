"""Triton for the tests of kernels: on a GPU, or its interpreter where Triton is installed."""

import os
import sys
from pathlib import Path

import pytest
import torch

from miles_testing.devices import DEVICES

sys.path.insert(0, str(Path(__file__).parent))

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a test imports what imports Triton


@pytest.fixture(scope="session")
def triton():
    if not torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton was imported without its interpreter")
    return pytest.importorskip("triton")


@pytest.fixture(params=DEVICES)
def on_device(request):
    """Options of a run on each device that is here. On a GPU, two runs are compared bit by bit with deterministic algorithms only."""
    if request.param == "cpu":
        return {"device": "cpu"}
    return {"device": "cuda", "dtype": "bfloat16", "embedded_deterministic": True}
