"""Routers on a GPU, whose choice and replay a kernel computes."""

from collections import Counter

import pytest
import torch
import transformers
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from miles_embedded import kernels_run, routed_blocks
from miles_embedded.model.gpu_operations import route
from miles_embedded.model.load import NAME, prepare
from miles_r3 import ROUTES
from miles_r3.embedded import OWN, matching_rule
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


@pytest.fixture
def on_gpu(block_with_call):
    """``make(family, dtype, route) -> block, run`` on the GPU."""
    if not kernels_run(torch.device("cuda")):
        pytest.skip("Triton cannot run here")
    return lambda family, dtype, route: block_with_call(family, dtype=dtype, route=route, device="cuda")


def backward(block, ctx):
    """Return the gradients of the block's parameters."""
    output = ctx.attached["output"]
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).to(output)
    parameters = dict(block.named_parameters())
    found = torch.autograd.grad(output, list(parameters.values()), grad, allow_unused=True)
    return {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}


def count_launches(compute):
    """Return how often each kernel is launched by ``compute``, which ran before."""
    for _ in range(2):
        compute()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        compute()
        torch.cuda.synchronize()
    events = [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]
    return Counter(name for name in events if not name.startswith(("Mem", "mem")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_replay_by_the_kernel_is_that_of_the_familys_code(on_gpu, family, dtype):
    (plain, run), (block, run_fast) = (on_gpu(family, dtype, each) for each in (None, route))
    draw = torch.rand(48, block.experts.num_experts, generator=torch.Generator().manual_seed(3))
    routes = draw.topk(2).indices.cuda()
    expected, found = run("train", routes), run_fast("train", routes)
    limit = 16 * torch.finfo(dtype).eps
    close = {"rtol": limit, "atol": limit * float(expected.attached["output"].abs().max())}
    torch.testing.assert_close(found.attached["output"], expected.attached["output"], **close)
    (own,), (mine,) = (list(ctx.attached[OWN].values()) for ctx in (expected, found))
    assert torch.equal(own.sort(-1).values, mine.sort(-1).values)
    grads, others = backward(plain, expected), backward(block, found)
    assert grads.keys() == others.keys() and any("gate.weight" in name for name in grads)
    for name, grad in grads.items():
        assert (others[name].double() - grad.double()).norm() <= limit * grad.double().norm(), name


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_replay_launches_as_many_kernels_as_a_plain_step(on_gpu, family):
    """One forward and one backward for the router; Mixtral converts its logits and their gradient, too."""
    launches = {}
    for side in (None, route):
        block, run = on_gpu(family, torch.bfloat16, side)
        own = run("rollout").extras[ROUTES.name].long()
        for routes in (None, own):
            name = ("kernel" if side else "torch", "plain" if routes is None else "replay")
            launches[name] = count_launches(
                lambda run=run, block=block, routes=routes: backward(block, run("train", routes))
            )
    for name, found in launches.items():
        print(family, *name, found.total())
    plain, replay = launches["kernel", "plain"], launches["kernel", "replay"]
    assert plain["_choose"] == plain["_differentiate"] == 1
    assert replay == plain
    assert launches["torch", "plain"].total() >= plain.total() + 6
    assert launches["torch", "replay"].total() > launches["torch", "plain"].total()


def test_the_operation_is_captured_whole(on_gpu):
    """``torch.compile`` without a break of the graph, with the bits of the eager call."""
    logits = torch.randn(64, 60, generator=torch.Generator().manual_seed(0)).cuda().bfloat16()
    given = torch.rand(64, 60, generator=torch.Generator().manual_seed(1)).topk(4).indices.cuda()

    def gradient(function, which):
        leaf = logits.clone().requires_grad_()
        weights, own = function(leaf, which)
        weights.float().square().sum().backward()
        return weights, own, leaf.grad

    def compute(logits, which):
        return route(logits, 4, True, which)

    compiled = torch.compile(compute, fullgraph=True)
    for which in (None, given):
        pairs = zip(gradient(compute, which), gradient(compiled, which), strict=True)
        assert all(torch.equal(eager, other) for eager, other in pairs)
