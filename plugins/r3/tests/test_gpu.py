"""Routers on a GPU, whose choice a kernel computes as long as no gradient is needed."""

import pytest
import torch
import transformers

from miles_embedded import kernels_run, routed_blocks
from miles_embedded.model.load import NAME, prepare
from miles_r3.embedded import matching_rule
from miles_r3.routers import softmax_then_gather

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("dtype", "places"), [(torch.float32, 16), (torch.bfloat16, 1)])
def test_routers_are_matched_although_their_kernel_rounds_differently(dtype, places):
    """Small routers, for which two logits are often equal or neighbours in BF16."""
    if not kernels_run(torch.device("cuda")):
        pytest.skip("Triton cannot run here")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=NAME, experts_implementation=NAME
    )
    blocks = [found.block for found in routed_blocks(model)]
    with torch.no_grad():
        for block in blocks:
            block.gate.weight.normal_(std=0.05)
    prepare(model.cuda())
    hidden = torch.randn(512, 64, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    differing = 0
    for block in blocks:
        assert matching_rule(block) is softmax_then_gather
        with torch.no_grad():
            logits, weights, index = block.gate(hidden)
            recomputed = softmax_then_gather(logits, index, block)
        torch.testing.assert_close(weights, recomputed, rtol=places * torch.finfo(dtype).eps, atol=0)
        differing += int((weights != recomputed).sum())
    assert differing > 0  # else this test shows nothing
