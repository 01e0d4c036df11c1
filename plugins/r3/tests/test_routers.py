from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

from miles_core.plugin import PluginError
from miles_embedded import Operations, use_operations
from miles_embedded.model.load import NAME
from miles_r3.embedded import matching_rule, moe_blocks
from miles_r3.routers import softmax_of_gathered, softmax_then_gather

COMMON = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
GROUPED = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
QWEN = {"num_experts": 8, "moe_intermediate_size": 16}
FAMILIES = {
    "Qwen3Moe": ({**QWEN, "norm_topk_prob": True}, "softmax_then_gather", "softmax_then_gather"),
    "Qwen2Moe": ({**QWEN, "shared_expert_intermediate_size": 16}, "softmax_then_gather", "softmax_then_gather"),
    "DeepseekV3": ({**GROUPED, **LATENT, "routed_scaling_factor": 2.5}, "sigmoid_scaled", "sigmoid_scaled"),
    "Glm4Moe": (GROUPED, "sigmoid_scaled", "sigmoid_scaled"),
    "Mixtral": ({"num_local_experts": 8}, "softmax_then_gather", "softmax_in_float"),
    "MiniMaxM2": ({"num_local_experts": 8, "head_dim": 16, "rotary_dim": 8}, "sigmoid_scaled", "sigmoid_plain"),
    "Lfm2Moe": (
        {**QWEN, "num_dense_layers": 0, "layer_types": ["conv"] * 2, "routed_scaling_factor": 2.0},
        "sigmoid_scaled_safely",
        "sigmoid_scaled",  # 1e-6 changes no bit of a sum in BF16
    ),
    "Jamba": (
        {"num_experts": 8, "attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_offset": 0},
        "softmax_unnormalized",
        "softmax_unnormalized",
    ),
    "GptOss": ({"num_local_experts": 8, "head_dim": 16}, "softmax_of_gathered", "softmax_of_gathered"),
}


def block_of(family, dtype=torch.float32, **changes):
    values, *_ = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **values, **changes})
    backend = "eager" if family == "GptOss" else NAME
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=backend, experts_implementation=backend
    )
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "correction_bias" in name:
                value.normal_()  # selects, and must not reach the weights
    return moe_blocks(model.eval())[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_family_is_matched_by_its_rule(family, dtype):
    expected = FAMILIES[family][1 if dtype is torch.float32 else 2]
    assert matching_rule(block_of(family, dtype)).__name__ == expected


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
def test_weights_that_are_not_normalised_are_matched(family):
    assert matching_rule(block_of(family, norm_topk_prob=False)) is not None


def test_golden_weights():
    block = SimpleNamespace(gate=nn.Linear(1, 1), experts=nn.Identity())
    logits, index = torch.tensor([[2, 1, 0.5, -1]]), torch.tensor([[0, 2]])
    expected = torch.tensor([[0.8175745, 0.1824255]])
    torch.testing.assert_close(softmax_then_gather(logits, index, block), expected)
    torch.testing.assert_close(softmax_of_gathered(logits, index, block), expected)


def block_with_ties(dtype):
    """A block whose 32 router rows are 8 rows, four times each: every token's best four logits are equal."""
    block = block_of("Qwen3Moe", dtype, num_experts=32, hidden_size=64)
    with torch.no_grad():
        rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) / 8
        block.gate.weight.copy_(rows.repeat(4, 1))
    return block


class OtherKernel:
    """A router's choice as another library may compute it: equal probabilities in any order, and weights in the next place in half of the
    rows."""

    def __init__(self, places=1):
        self.places, self.calls, self.draw = places, 0, torch.Generator().manual_seed(0)

    def __call__(self, logits, k, normalized):
        self.calls += 1
        order = torch.randperm(logits.shape[-1], generator=self.draw)
        weights, place = logits[:, order].softmax(-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
        weights, index = weights[:, :k], order[place[:, :k]]
        weights = (weights / weights.sum(-1, keepdim=True) if normalized else weights).to(logits.dtype)
        for _ in range(self.places):
            weights[::2] = torch.nextafter(weights[::2], torch.ones_like(weights[::2]))
        return weights, index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_in_place_of_the_familys_code_is_no_other_router(dtype):
    """As on a GPU, where a model computes the choice with its own kernel as long as no gradient is needed."""
    block, kernel = block_with_ties(dtype), OtherKernel()
    assert use_operations(block, Operations(route=kernel))["route"] == 1
    hidden = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits, weights, index = block.gate(hidden)
    assert not torch.equal(index, block.gate(hidden)[2])
    assert not torch.equal(weights, softmax_then_gather(logits, index, block))
    assert matching_rule(block) is softmax_then_gather
    calls = kernel.calls
    block.gate(hidden)
    assert kernel.calls == calls + 1  # in use again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_may_be_chosen_in_any_order(dtype):
    block, kernel = block_with_ties(dtype), OtherKernel(places=0)

    class AnyOrder(type(block.gate)):
        def forward(self, hidden):
            logits = nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
            return logits, *kernel(logits, self.top_k, True)

    block.gate.__class__ = AnyOrder
    assert matching_rule(block) is softmax_then_gather and kernel.calls == 1


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_router_that_rounds_differently_itself_is_refused(where):
    """Only the operations of a model's table may round differently: no other code of the family or of a plugin."""
    block = block_with_ties(torch.bfloat16)
    base = type(block.gate).forward

    def forward(self, hidden):
        logits, weights, index = base(self, hidden)
        return logits, torch.nextafter(weights, torch.ones_like(weights)), index

    if where == "class":
        block.gate.__class__ = type("Shifted", (type(block.gate),), {"forward": forward})
    else:
        block.gate.forward = forward.__get__(block.gate)
    with pytest.raises(PluginError, match="Qwen3MoeSparseMoeBlock"):
        matching_rule(block)


class OtherSums(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return torch.nextafter(found, found + 1) if func is torch.Tensor.sum else found


def test_rules_are_compared_where_they_are_replayed():
    """A plugin may replace torch's functions inside a block, as ``true_on_policy`` does; the replay then calls its functions, too."""
    block, mode = block_of("Qwen3Moe"), OtherSums()
    block.register_forward_pre_hook(lambda module, args: mode.__enter__() and None)
    block.register_forward_hook(lambda module, args, output: mode.__exit__(None, None, None))
    assert matching_rule(block) is softmax_then_gather


def test_an_unknown_router_is_refused_by_name():
    class OddBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = Experts()

        def forward(self, hidden):
            weights, index = self.gate(hidden).tanh().topk(2)
            return self.experts(hidden, index[0], weights[0])

    class Experts(nn.Module):
        num_experts = 4

        def forward(self, hidden, index, weights):
            return hidden

    with pytest.raises(PluginError, match="OddBlock"):
        matching_rule(OddBlock())
