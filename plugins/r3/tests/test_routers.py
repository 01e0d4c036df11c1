from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from miles_core.plugin import PluginError
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
