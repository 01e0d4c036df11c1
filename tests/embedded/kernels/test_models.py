"""Every family with and without the kernels, on a GPU: what it computes, and its gradients."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from miles_embedded.engine.runner import Runner
from miles_embedded.model.gpu_operations import use_kernels
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
    found = score(model)
    use_operations(model, TORCH)
    torch.testing.assert_close(found, score(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_which_modules_have_kernels(name, tmp_path):
    model = load_model(tiny_checkpoint(name, tmp_path), "bfloat16", "cuda")
    table = operations_of(model)
    use_operations(model, TORCH)
    use_kernels(model)
    assert operations_of(model) == table
    expected = {"llama": {"norm": 5, "rotation": 2, "gate": 2, "route": 0, "delta_rule": 0, "of_sum": 2}}
    expected["qwen3_moe"] = {"norm": 9, "rotation": 2, "gate": 0, "route": 2, "delta_rule": 0, "of_sum": 2}
    assert use_operations(model, table) == expected[name]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_norms_of_sums_change_no_bit(name, tmp_path):
    model = load_model(tiny_checkpoint(name, tmp_path), "bfloat16", "cuda")
    table, found = operations_of(model), score(model)
    norm = table.norm.__call__  # without the method ``of_sum``
    assert use_operations(model, replace(table, norm=norm))["of_sum"] == 0
    assert torch.equal(score(model), found)


def score(model):
    values = Runner(model).score([list(range(2, 22)), [5, 6, 7]], 1.0)
    return torch.cat([torch.from_numpy(v) for v in values])


def test_linear_layers_that_read_one_input_are_multiplied_at_once(tmp_path):
    model = load_model(tiny_checkpoint("qwen3", tmp_path), "float32", "cuda")
    joint = model.model.layers[0].self_attn.q_proj.miles_joint
    matrix = joint._matrix()
    torch.testing.assert_close(matrix, torch.cat([layer.weight for layer in joint.layers]), rtol=0, atol=0)
    found = score(model)
    copied = copy.deepcopy(model)  # whose weights are in memory of their own
    assert copied.model.layers[0].self_attn.q_proj.miles_joint.layers[0] is copied.model.layers[0].self_attn.q_proj
    torch.testing.assert_close(score(copied), found, rtol=1e-4, atol=1e-4)
    k = model.model.layers[0].self_attn.k_proj.weight
    k.data = k.detach().clone()  # as after an update that shares the trainer's
    assert joint._matrix() is None
    torch.testing.assert_close(score(model), found, rtol=1e-4, atol=1e-4)
