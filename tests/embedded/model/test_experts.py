"""The grouped experts equal Transformers' eager loop, forward and backward, for every layout of the weights."""

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from miles_embedded.model import experts
from miles_embedded.model import grouped_experts as grouped
from miles_embedded.model.experts import grouped_experts
from miles_embedded.model.load import NAME

_DeepseekV3Experts = getattr(modeling_deepseek_v3, "DeepseekV3Experts", None) or modeling_deepseek_v3.DeepseekV3NaiveMoe

FAMILIES = {
    "qwen3_moe": (Qwen3MoeExperts, Qwen3MoeConfig(hidden_size=24, num_experts=6, moe_intermediate_size=16)),
    "deepseek_v3": (
        _DeepseekV3Experts,
        DeepseekV3Config(hidden_size=24, n_routed_experts=6, n_group=1, moe_intermediate_size=16),
    ),
    "mixtral": (MixtralExperts, MixtralConfig(hidden_size=24, num_local_experts=6, intermediate_size=16)),
    # Biases, transposed and interleaved weights, a gate of its own.
    "gpt_oss": (GptOssExperts, GptOssConfig(hidden_size=24, num_local_experts=6, intermediate_size=16)),
}


def build(family, dtype=torch.float64):
    kind, config = FAMILIES[family]
    module = kind(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module


def inputs(rows, dtype=torch.float64, choices=4):
    """Choices among the first ``choices`` experts, so that some experts get no row."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, 24, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    index = torch.rand(rows, choices, generator=generator).argsort(1)[:, :2]
    weights = torch.rand(rows, 2, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, index, weights


def run(module, implementation, arguments):
    module.config._experts_implementation = implementation
    out = module(*arguments)
    leaves = [arguments[0], arguments[2], *module.parameters()]
    grads = torch.autograd.grad((out * torch.arange(out.numel()).view_as(out).sin()).sum(), leaves)
    return [out, *grads]


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_eager_in_value_and_gradient(family, rows):
    module, arguments = build(family), inputs(rows)
    for ours, theirs in zip(run(module, NAME, arguments), run(module, "eager", arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_bfloat16_stays_within_its_own_rounding(family):
    module, arguments = build(family, torch.bfloat16), inputs(37, torch.bfloat16)
    for ours, theirs in zip(run(module, NAME, arguments), run(module, "eager", arguments), strict=True):
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


@pytest.mark.parametrize("rows", [1, 37, 4000])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_gradient_all_experts_go_at_once_and_give_the_same(family, rows):
    module, arguments = build(family, torch.float32), inputs(rows, torch.float32)
    with torch.no_grad():
        found = []
        for implementation in (NAME, "eager"):
            module.config._experts_implementation = implementation
            found.append(module(*arguments))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_the_usual_expert_takes_the_short_way_and_others_do_not(monkeypatch):
    taken = []
    original = grouped._SwiGLUExperts.apply
    monkeypatch.setattr(grouped._SwiGLUExperts, "apply", lambda *a: taken.append(1) or original(*a))
    for family in ("qwen3_moe", "gpt_oss"):
        grouped_experts(build(family), *inputs(5))
    assert len(taken) == 1


def test_step_by_step_equals_the_short_way(monkeypatch):
    module, arguments = build("qwen3_moe"), inputs(37)
    short = run(module, NAME, arguments)
    monkeypatch.setattr(experts, "is_standard", lambda *a: False)
    for ours, theirs in zip(run(module, NAME, arguments), short, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_frozen_weights_get_no_gradient():
    module, (hidden, index, weights) = build("qwen3_moe").requires_grad_(False), inputs(9)
    grouped_experts(module, hidden, index, weights).sum().backward()
    assert hidden.grad is not None and weights.grad is not None and module.gate_up_proj.grad is None
