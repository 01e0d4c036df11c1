"""The capacity of experts against a loop over experts and tokens, and in runs."""

import math

import pytest
import torch
from torch.nn.functional import silu

from miles_core.trainer import Context
from miles_embedded import routed_blocks
from miles_embedded.model import call as calls
from miles_experts.capacity import DROPPED, capacity_of, count_dropped, find_kept, limit_capacity

ROWS = 24


def reference_kept(index, weights, experts, capacity, policy):
    """Expert by expert, in the words of the definition."""
    kept = torch.zeros_like(index, dtype=torch.bool)
    for expert in range(experts):
        asking = [
            (row, choice)
            for row in range(len(index))
            for choice in range(index.shape[1])
            if index[row, choice] == expert
        ]
        if policy == "probs":
            asking.sort(key=lambda place: -float(weights[place].detach()))
        for place in asking[:capacity]:
            kept[place] = True
    return kept


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_the_kept_assignments_are_those_of_the_definition(policy):
    generator = torch.Generator().manual_seed(0)
    for experts, k, rows in ((4, 2, 30), (8, 1, 5), (3, 3, 7)):
        index = torch.rand(rows, experts, generator=generator).topk(k)[1]
        weights = torch.randint(1, 6, (rows, k), generator=generator).float()  # with ties
        for capacity in (1, 3, rows):
            found = find_kept(index, weights, experts, capacity, policy == "probs")
            assert torch.equal(found, reference_kept(index, weights, experts, capacity, policy))


def test_the_capacity_is_a_rounded_up_share():
    assert capacity_of(1.25, 10, 2, 4) == math.ceil(6.25)
    assert capacity_of(1.1, 20, 2, 4) == 11, "1.1 * 10 is 11.000000000000002 in binary"
    assert capacity_of(0.001, 3, 1, 8) == 1


def through(block, hidden, kind="train"):
    ctx = Context(kind, (0, 1), torch.arange(len(hidden)))
    ctx.attached[DROPPED] = []
    calls._active.ctx = ctx
    try:
        out = block(hidden.unsqueeze(0))
    finally:
        calls._active.ctx = None
    return (out[0] if isinstance(out, tuple) else out)[0], count_dropped(ctx)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_output_and_gradients_are_those_of_the_formula(model_of, policy):
    model = model_of("qwen3_moe")
    limit_capacity(model, 0.75, policy)
    block = routed_blocks(model)[0].block
    hidden = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    out, metrics = through(block, hidden)
    capacity = capacity_of(0.75, ROWS, 2, 4)

    plain = hidden.detach().clone().requires_grad_()
    scores = (plain @ block.gate.weight.t()).softmax(-1)
    weights, index = scores.topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    kept = reference_kept(index, weights, 4, capacity, policy)
    expected = torch.zeros_like(plain)
    for row, choice in kept.nonzero().tolist():
        expert = index[row, choice]
        gate, up = (plain[row] @ block.experts.gate_up_proj[expert].t()).chunk(2)
        expected = expected.index_add(
            0,
            torch.tensor([row]),
            (weights[row, choice] * ((silu(gate) * up) @ block.experts.down_proj[expert].t()))[None],
        )
    torch.testing.assert_close(out, expected)
    dropped, total = metrics["moe/dropped_fraction"]
    assert (int(dropped), int(total)) == (int((~kept).sum()), 2 * ROWS) and 0 < dropped < total

    sought = (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((out * cotangent).sum(), (hidden, *sought))
    for ours, theirs in zip(found, torch.autograd.grad((expected * cotangent).sum(), (plain, *sought)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_llama4_drops_too(model_of):
    """Its scores weigh the experts' input, and are not passed with a choice."""
    model = model_of("llama4")
    found = routed_blocks(model)[0]
    hidden = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(1))
    limit_capacity(model, 0.5, "probs")
    scores = found.router(hidden)[0]
    calls._active.ctx = Context("train", (0, 1), torch.arange(ROWS))
    try:
        limited = found.router(hidden)[0]
    finally:
        calls._active.ctx = None
    chosen = scores != 0
    index = scores.topk(2)[1]
    kept = reference_kept(index, scores.gather(1, index), 8, capacity_of(0.5, ROWS, 2, 8), "probs")
    assert torch.equal(limited != 0, torch.zeros_like(chosen).scatter(1, index, kept)) and not torch.equal(
        limited, scores
    )


@pytest.mark.parametrize("kind", ["rollout", "verify"])
def test_rollouts_and_verifications_have_no_capacity(model_of, kind):
    model = model_of("qwen3_moe")
    block, hidden = routed_blocks(model)[0].block, torch.randn(ROWS, 32)
    free = through(block, hidden, kind)[0]
    limit_capacity(model, 0.25, "probs")
    assert torch.equal(through(block, hidden, kind)[0], free)


def test_a_run_counts_what_it_drops(toy_run):
    plain, limited = toy_run(), toy_run(["experts"], moe_capacity_factor=0.5)
    wide = toy_run(["experts"], moe_capacity_factor=100.0, recompute_activations=True)
    dropped = [m["moe/dropped_fraction"] for m in limited.metrics if "train/loss" in m]
    assert dropped and all(0.1 < d < 0.9 for d in dropped)
    first = next(m for m in limited.metrics if "train/loss" in m)
    base = next(m for m in plain.metrics if "train/loss" in m)
    assert first["mismatch/abs_log_prob"] > 100 * base["mismatch/abs_log_prob"], "the engine drops nothing"
    for ours, theirs in zip(wide.metrics, plain.metrics, strict=True):
        assert ours.get("train/grad_norm") == pytest.approx(theirs.get("train/grad_norm"), rel=1e-5)
        assert ours.get("moe/dropped_fraction", 0) == 0


def test_recomputation_drops_the_same(toy_run):
    once, twice = (toy_run(["experts"], moe_capacity_factor=0.5, recompute_activations=r) for r in (None, True))
    for ours, theirs in zip(once.metrics, twice.metrics, strict=True):
        for name in ("train/grad_norm", "moe/dropped_fraction"):
            assert ours.get(name) == pytest.approx(theirs.get(name), rel=1e-5)


def test_replayed_routes_are_dropped_too(toy_run):
    done = toy_run(["r3", "experts"], moe_capacity_factor=0.5)
    step = next(m for m in done.metrics if "train/loss" in m)
    assert step["moe/dropped_fraction"] > 0.1 and "r3/tokens_differing" in step
