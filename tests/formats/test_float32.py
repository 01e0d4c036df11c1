"""FP32 products are not rounded to TF32."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from miles_formats import use_float32_products
from miles_testing import tiny_checkpoint


@pytest.fixture
def restore():
    """Restore the settings of this process."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def allow_by_flag():
    torch.backends.cuda.matmul.allow_tf32 = True


def allow_by_precision():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


@pytest.mark.parametrize("allow", [allow_by_flag, allow_by_precision])
def test_products_that_a_program_allowed_to_round_are_not_rounded(restore, allow, caplog):
    allow()
    use_float32_products()
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert "FP32 products were set to TF32" in caplog.text
    caplog.clear()
    use_float32_products()
    assert not caplog.text


CODE = """import sys, torch
from miles_embedded.model.load import load_model
before = torch.get_float32_matmul_precision()
load_model(sys.argv[1])
print(before, torch.get_float32_matmul_precision())
"""


def test_a_model_loaded_where_the_environment_allows_rounding_is_not_rounded(tmp_path):
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", CODE, tiny_checkpoint("llama", tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == ["high", "highest"], found.stderr
