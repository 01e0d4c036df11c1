"""Record and replay of every family: in its router alone, and in whole runs."""

import pytest
import torch

from miles_core.plugin import DataError, PlanError
from miles_r3 import ROUTES
from miles_r3.embedded import OWN
from miles_r3.hooks import check_routes, disagreement
from miles_r3.routers import router_of
from miles_testing import plan

FAMILIES = ("qwen3_moe", "deepseek_v3", "deepseek_v32", "glm4_moe", "minimax_m2", "mixtral", "gpt_oss")
#: Those whose routers are called otherwise, or weigh the experts' input.
OTHERS = ("granitemoe", "gemma4", "llama4")
ROWS = 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_what_was_recorded_changes_no_bit(block_with_call, family, dtype):
    _, run = block_with_call(family, dtype=dtype)
    with torch.no_grad():
        rollout = run("rollout")
        routes = rollout.extras[ROUTES.name]
        assert routes.shape == (ROWS, 2) and len(routes.unique(dim=0)) > 3
        replayed = run("train", routes.long())
    assert torch.equal(replayed.attached["output"], rollout.attached["output"])
    assert all(float(count) == 0 for count, _ in disagreement(replayed).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_foreign_experts_get_the_weights_of_the_gathered_scores(block_with_call, family):
    """Value and router gradient against autograd of contracts' formula, written out here once more."""
    block, run = block_with_call(family)
    experts = router_of(block).weight.shape[0]
    routes = (run("rollout").extras[ROUTES.name].long() + 1) % experts
    seen = {}
    block.experts.register_forward_pre_hook(
        lambda module, args: seen.update(hidden=args[0], index=args[1], weights=args[2])
    )
    ctx = run("train", routes)
    assert torch.equal(seen["index"], routes)
    assert float(disagreement(ctx)["r3/tokens_differing"][0]) > 0 and OWN not in ctx.attached

    router = router_of(block)
    weight = router.weight.detach().clone().requires_grad_()
    logits = seen["hidden"].detach() @ weight.T
    if family == "gpt_oss":
        expected = (logits + router.bias.detach()).gather(-1, routes).softmax(-1)
    else:
        scores = logits.softmax(-1) if family in ("qwen3_moe", "mixtral") else logits.sigmoid()
        expected = scores.gather(-1, routes)
        expected = expected / expected.sum(-1, keepdim=True)
        if family in ("deepseek_v3", "deepseek_v32", "glm4_moe"):
            expected = expected * block_setting(block, "routed_scaling_factor")
    torch.testing.assert_close(seen["weights"], expected)
    coefficients = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(2))
    (expected * coefficients).sum().backward()
    router.weight.grad = None
    (seen["weights"] * coefficients).sum().backward()
    torch.testing.assert_close(router.weight.grad, weight.grad)
    assert weight.grad.abs().max() > 1e-4


def block_setting(block, name):
    return getattr(router_of(block), name, None) or getattr(block, name)


@pytest.mark.parametrize("family", (*FAMILIES, *OTHERS))
def test_a_run_of_the_family(toy_run, family):
    """Continuous batching, shared prompts, two optimiser steps a rollout, recomputed activations, micro-batches; longer than
    windows and what an indexer keeps."""
    run = toy_run(
        ["r3"],
        steps=2,
        family=family,
        num_steps_per_rollout=2,
        recompute_activations=True,
        micro_batch_size=3,
        rollout_max_response_len=10,
        lr=1e-2,
    )
    for record in run.metrics:
        assert record["mismatch/abs_log_prob"] < 1e-4 and record["train/grad_norm"] > 0
        assert 0 <= record["r3/routers_differing"] <= record["r3/tokens_differing"] <= 1


def test_replay_holds_the_routing_through_several_optimiser_steps(toy_run):
    """The policy moves, its own choices with it, and the counter sees them."""
    run = toy_run(["r3"], steps=1, num_steps_per_rollout=4, lr=0.1)
    assert run.metrics[0]["r3/routers_differing"] > 0


def test_dense_models_and_engines_without_routing_are_refused_before_anything_is_built(tmp_path):
    with pytest.raises(PlanError, match="no router to replay in a dense model"):
        plan(["r3"], family="llama")
    path = tmp_path / "silent.py"
    path.write_text(
        "from miles_core.plugin import Plugin\n"
        "plugin = Plugin(name='silent', summary='no routes', version='1', core='>=0',\n"
        "    provides={'engine': {'silent': 'make'}}, capabilities={'engine': ('score',)})\n"
        "def make():\n    raise AssertionError\n"
    )
    with pytest.raises(PlanError, match="routed_experts"):
        plan([str(path), "r3"], engine="silent")


@pytest.mark.parametrize(
    ("shape", "top", "words"),
    [
        ((5, 3, 2), 7, "2 mixture-of-experts layers with 2"),
        ((5, 2, 4), 7, "shape"),
        ((5, 2), 7, "shape"),
        ((5, 2, 2), 8, "used expert 8"),
    ],
)
def test_records_of_another_model_are_refused(shape, top, words):
    with pytest.raises(DataError, match=words):
        check_routes(3, torch.full(shape, top).numpy(), 8, 2, 2)
    check_routes(3, torch.full((5, 2, 2), 7).numpy(), 8, 2, 2)
    check_routes(3, torch.full((5, 2, 2), 7).numpy(), None, None, None)
