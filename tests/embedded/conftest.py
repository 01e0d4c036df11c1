"""Triton for the tests of kernels: on a GPU, or its interpreter where Triton is installed."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a test module imports what imports Triton


@pytest.fixture(scope="session")
def triton():
    if torch.cuda.is_available():
        return pytest.importorskip("triton")
    if not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton was imported without its interpreter")
    found = pytest.importorskip("triton")
    import triton.runtime.interpreter as interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, *args):  # Triton 3.6 turns arrays of one element into numbers, which NumPy 2.4 refuses
        patch(tensor, *args)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])

    interpreter._patch_lang_tensor = patched
    return found
