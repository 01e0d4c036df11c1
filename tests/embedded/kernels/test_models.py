"""Every family with and without the kernels, on a GPU: what it computes, and its gradients."""

from __future__ import annotations

import pytest
import torch

from miles_embedded.engine.runner import Runner
from miles_embedded.kernels.operations import use_kernels
from miles_embedded.model.load import load_model
from miles_embedded.model.operations import TORCH, operations_of, use_operations
from miles_testing.tiny import FAMILIES, ROUTER_FAMILIES, tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", [*FAMILIES, *ROUTER_FAMILIES])
def test_a_family_computes_the_same(name, tmp_path):
    model = load_model(tiny_checkpoint(name, tmp_path), "float32", "cuda")
    assert operations_of(model).norm is not None
    found = scored(model)
    use_operations(model, TORCH)
    torch.testing.assert_close(found, scored(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_which_modules_have_kernels(name, tmp_path):
    model = load_model(tiny_checkpoint(name, tmp_path), "bfloat16", "cuda")
    table = operations_of(model)
    use_operations(model, TORCH)
    use_kernels(model)
    assert operations_of(model) == table
    expected = {"llama": {"norm": 5, "rotation": 2, "gate": 2, "route": 0}}
    expected["qwen3_moe"] = {"norm": 9, "rotation": 2, "gate": 0, "route": 2}
    assert use_operations(model, table) == expected[name]


def scored(model):
    values = Runner(model).score([list(range(2, 22)), [5, 6, 7]], 1.0)
    return torch.cat([torch.from_numpy(v) for v in values])
