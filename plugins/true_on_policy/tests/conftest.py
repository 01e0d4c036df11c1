"""Triton for the tests of kernels: on a GPU, or its interpreter where Triton is installed."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a test imports what imports Triton


@pytest.fixture(scope="session")
def triton():
    if not torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton was imported without its interpreter")
    return pytest.importorskip("triton")
