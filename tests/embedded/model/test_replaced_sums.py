"""Sums of decoder layers that are computed together with their norms."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_embedded.engine.runner import Runner
from miles_embedded.model.load import load_model
from miles_embedded.model.operations import TORCH, use_operations
from miles_embedded.model.parts import class_forwards
from miles_embedded.model.row_readers import set_reader
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.tiny import FAMILIES, ROUTER_FAMILIES, tiny_checkpoint

#: Families whose decoder layers are not like Llama's: other sums, other arguments of attention, or norms of results.
OTHERS = {"granitemoe", "llama4", "gemma4"}


class Norm:
    """A norm that can compute the sum in front of it, and counts how often it does which."""

    def __init__(self):
        self.calls, self.sums, self.epilogues = 0, 0, []

    def __call__(self, x, weight, eps, epilogue=None):
        self.calls += 1
        return self._compute(x, weight, eps)

    def of_sum(self, x, other, weight, eps, epilogue=None):
        self.sums += 1
        self.epilogues.append(epilogue)
        return x + other, self._compute(x + other, weight, eps)

    def _compute(self, x, weight, eps):
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def make_batch():
    tokens = [[*range(2, 16)], [5, 6, 7, 9]]
    return collate([Sample(tokens=t, response_length=len(t) - 2, index=i) for i, t in enumerate(tokens)])


@pytest.fixture
def model(tmp_path):
    return load_model(tiny_checkpoint("qwen3", tmp_path))


@pytest.fixture
def norm(model):
    found = Norm()
    use_operations(model, replace(TORCH, norm=found))
    found.sums, found.epilogues = 0, []  # without the comparison
    return found


def score(model):
    values = Runner(model).score([list(range(2, 22)), [5, 6, 7]], 1.0)
    return torch.cat([torch.from_numpy(v) for v in values])


@pytest.mark.parametrize("name", [*FAMILIES, *ROUTER_FAMILIES])
def test_a_family_computes_the_same(name, tmp_path):
    model = load_model(tiny_checkpoint(name, tmp_path))
    expected = score(model)
    norm = Norm()
    done = use_operations(model, replace(TORCH, norm=norm))
    compared = norm.sums
    torch.testing.assert_close(score(model), expected, rtol=1e-5, atol=1e-5)
    assert done["of_sum"] == (0 if name in OTHERS else 2)
    assert norm.sums - compared == 2 * done["of_sum"]
    use_operations(model, TORCH)
    calls = norm.calls
    assert torch.equal(score(model), expected) and norm.calls == calls


def test_a_wrong_sum_is_not_used(model):
    class Wrong(Norm):
        def of_sum(self, x, other, weight, eps, epilogue=None):
            self.sums += 1
            return x + other, self._compute(x, weight, eps)

    expected, norm = score(model), Wrong()
    done, tried = use_operations(model, replace(TORCH, norm=norm)), norm.sums
    assert (done["norm"], done["of_sum"]) == (9, 0)
    torch.testing.assert_close(score(model), expected, rtol=1e-5, atol=1e-5)
    assert tried and norm.sums == tried


def test_each_norm_behind_a_sum_is_computed_with_it(model, norm):
    before = norm.calls
    score(model)
    # the first norm of the first layer, and two norms of queries and keys in each layer
    assert (norm.sums, norm.calls - before) == (4, 1 + 2 * 2)


def test_hooks_of_all_modules_run(model, norm):
    seen = {}
    watched = {n: m for n, m in model.named_modules() if "layer" in n or n == "model.norm"}
    for name, module in watched.items():
        module.register_forward_hook(lambda m, args, out, name=name: seen.__setitem__(name, out))
    found = score(model)
    use_operations(model, replace(TORCH, norm=norm.__call__))
    expected = dict(seen)
    seen.clear()
    assert torch.equal(score(model), found)
    assert seen.keys() == expected.keys() == watched.keys() - {"model.layers"}
    for name, out in seen.items():
        if isinstance(out, torch.Tensor):
            assert torch.equal(out, expected[name]), name


@pytest.mark.parametrize("where", ["model.layers.0", "model.layers.0.mlp", "model.layers.1.self_attn.o_proj"])
@pytest.mark.parametrize("how", ["another tensor", "in place"])
def test_a_hook_that_changes_a_result_counts(model, norm, where, how):
    module = model.get_submodule(where)

    def change(m, args, out):
        return out * 2 if how == "another tensor" else out.mul_(2)

    module.register_forward_hook(change)
    found = score(model)
    use_operations(model, replace(TORCH, norm=norm.__call__))
    assert torch.equal(score(model), found)


def test_a_copy_uses_its_own_norms(model, norm):
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.norm.weight.mul_(2)
    found = score(copied)
    use_operations(copied, replace(TORCH, norm=norm.__call__))
    assert torch.equal(score(copied), found) and not torch.equal(score(model), found)


def test_suspended_replacements_use_the_code_of_the_class(model, norm):
    with class_forwards(model):
        score(model)
    assert not norm.sums


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_separate_sums(model, norm, recompute):
    batch = make_batch()

    def gradients():
        trainer = EmbeddedTrainer(model, TrainerConfig(recompute=recompute))
        for _, micro_batch, ctx in trainer.micro_batches(batch, "train", False):
            trainer.forward(model, micro_batch, ctx).log_probs.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    found, sums = gradients(), norm.sums
    assert sums == (0 if recompute else 4)
    use_operations(model, replace(TORCH, norm=norm.__call__))
    model.zero_grad()
    expected = gradients()
    assert norm.sums == sums
    for name, grad in found.items():
        assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_a_sum_in_front_of_a_sharded_weight_is_a_plain_one(model, norm):
    class Sharded(nn.Parameter):
        pass

    expected = score(model)
    assert norm.sums == 4
    model.model.norm.weight = Sharded(model.model.norm.weight.data)
    assert torch.equal(score(model), expected) and norm.sums == 4 + 3


def test_what_reads_the_norm_gets_its_epilogue(model, norm):
    given = []
    set_reader(model.model.layers[1].input_layernorm, lambda shape, dtype: given.append((shape, dtype)) or "epilogue")
    score(model)
    assert given == [((21, model.config.hidden_size), torch.float32)]
    assert norm.epilogues == [None, "epilogue", None, None]
