"""Routers whose model computes their choice with an operation that accepts given experts, as on a GPU: the operation replays."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from miles_core.plugin import PluginError
from miles_embedded import operations_of, use_operations
from miles_embedded.model import load
from miles_embedded.model.gpu_operations import route as torchs_route
from miles_embedded.model.operations import TORCH
from miles_r3 import ROUTES
from miles_r3.embedded import OWN

#: Families whose router is a softmax, and their types. Mixtral's weights are FP32 in every model.
FAMILIES = [(family, dtype) for family in ("qwen3_moe", "mixtral") for dtype in (torch.float32, torch.bfloat16)]
#: Names of dispatched operations that compute nothing.
VIEWS = (
    "view",
    "select",
    "slice",
    "detach",
    "_unsafe_view",
    "alias",
    "t",
    "transpose",
    "expand",
    "unsqueeze",
    "empty",
    "new_empty",
)


class Counted:
    """An operation for routes, and how often it replayed and chose."""

    def __init__(self, route):
        self.route, self.replayed, self.chosen = route, 0, 0

    def __call__(self, logits, k, normalized, given=None):
        self.replayed, self.chosen = self.replayed + (given is not None), self.chosen + (given is None)
        return self.route(logits, k, normalized, given)

    def clear(self):
        self.replayed = self.chosen = 0


def kernel(logits, k, normalized, given=None):
    """The kernel's results on the device of ``logits``, computed where Triton runs."""
    from miles_embedded.kernels.route import choose

    where = "cuda" if torch.cuda.is_available() else "cpu"
    weights, index = choose(logits.to(where), k, normalized, None if given is None else given.to(where))
    return weights.to(logits.device), index.to(logits.device)


@pytest.fixture(params=["torch", "kernel"])
def route(request):
    if request.param == "torch":
        return Counted(torchs_route)
    request.getfixturevalue("triton")
    return Counted(kernel)


def draw_routes(block, rows=48):
    draw = torch.rand(rows, block.experts.num_experts, generator=torch.Generator().manual_seed(3))
    return draw.topk(2).indices


def gradients(block, ctx):
    output = ctx.attached["output"]
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).to(output.dtype))
    found = {name: each.grad.clone() for name, each in block.named_parameters() if each.grad is not None}
    block.zero_grad()
    return found


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_it_is_the_replay_of_the_familys_code(block_with_call, route, family, dtype):
    (plain, run), (block, run_fast) = (
        block_with_call(family, dtype=dtype),
        block_with_call(family, dtype=dtype, route=route),
    )
    routes = draw_routes(block)
    route.clear()
    expected, found = run("train", routes), run_fast("train", routes)
    assert (route.replayed, route.chosen) == (1, 0)
    close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(found.attached["output"], expected.attached["output"], **close)
    own, mine = (ctx.attached[OWN] for ctx in (expected, found))
    assert own.keys() == mine.keys() and len(own) == 1
    (layer,) = own
    assert torch.equal(own[layer], mine[layer]) and not torch.equal(mine[layer], routes)
    grads, others = gradients(plain, expected), gradients(block, found)
    assert grads.keys() == others.keys() and any("gate.weight" in name for name in grads)
    for name, grad in grads.items():
        assert (others[name].double() - grad.double()).norm() <= 8 * torch.finfo(dtype).eps * grad.double().norm(), name


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_replaying_the_own_routes_changes_no_bit(block_with_call, route, family, dtype):
    """As in a rollout that the operation routed, so engine and trainer have the same weights if they have the same logits."""
    block, run = block_with_call(family, dtype=dtype, route=route)
    rollout = run("rollout")
    routes = rollout.extras[ROUTES.name].long()
    plain, replayed = run("train"), run("train", routes)
    for ctx in (plain, replayed):
        assert torch.equal(ctx.attached["output"], rollout.attached["output"])
    expected, found = gradients(block, plain), gradients(block, replayed)
    assert expected.keys() == found.keys() and all(torch.equal(found[name], grad) for name, grad in expected.items())


class Operations(TorchDispatchMode):
    """Names of the dispatched operations that compute something."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_a_replay_needs_no_operation_more_than_a_plain_step(block_with_call, triton):
    def launch(logits, k, normalized, given=None):
        with _disable_current_modes():  # the interpreter copies the arguments of a kernel
            return kernel(logits, k, normalized, given)

    seen = {}
    for side, route in (("kernel", launch), ("torch", None)):
        block, run = block_with_call("qwen3_moe", route=route)
        own = run("rollout").extras[ROUTES.name].long()  # experts without rows need no operations
        for routes in (None, own):
            with Operations() as operations:
                gradients(block, run("train", routes))
            seen[side, routes is not None] = Counter(operations.names)
        seen[side, True]["ones"] -= 1  # the fixture's mask
    assert seen["kernel", True] == seen["kernel", False]
    # with torch: softmax, choice, sum, copy, division; their gradients; and a replay's softmax, gathering, sum and division
    assert {"_softmax", "topk", "sum", "_softmax_backward_data"} <= set(seen["torch", False] - seen["kernel", False])
    assert (seen["torch", True] - seen["torch", False]).total() >= 4


def test_an_operation_that_accepts_no_experts_is_not_used(block_with_call):
    calls = []

    def route(logits, k, normalized):
        calls.append(k)
        return torchs_route(logits, k, normalized)

    (block, run), (_, plain) = block_with_call("qwen3_moe", route=route), block_with_call("qwen3_moe")
    routes, calls[:] = draw_routes(block), []
    assert torch.equal(run("train", routes).attached["output"], plain("train", routes).attached["output"])
    assert len(calls) == 1


def test_an_operation_with_other_weights_is_refused(block_with_call):
    def route(logits, k, normalized, given=None):
        weights, index = torchs_route(logits, k, normalized, given)
        return (weights if given is None else weights * 1.001), index

    with pytest.raises(PluginError, match=r"Qwen3MoeSparseMoeBlock.*operation for routes"):
        block_with_call("qwen3_moe", route=route)


def test_other_rules_are_replayed_as_before(block_with_call):
    route = Counted(torchs_route)
    (block, run), (_, plain) = (block_with_call("deepseek_v3", route=each) for each in (route, None))
    routes = draw_routes(block)
    assert torch.equal(run("train", routes).attached["output"], plain("train", routes).attached["output"])
    assert not route.replayed


def test_deterministic_routing_keeps_its_own_rule(block_with_call):
    route = Counted(torchs_route)
    (block, run), (_, plain) = (block_with_call("qwen3_moe", deterministic=True, route=each) for each in (route, None))
    routes = draw_routes(block)
    assert torch.equal(run("train", routes).attached["output"], plain("train", routes).attached["output"])
    assert not route.replayed


def test_a_plugin_that_sets_the_operations_later_ends_it(block_with_call):
    """``true_on_policy`` drops the operations of a model: then the family's rule replays."""
    route = Counted(torchs_route)
    (block, run), (_, plain) = (block_with_call("qwen3_moe", route=each) for each in (route, None))
    use_operations(block, TORCH)
    route.clear()
    routes = draw_routes(block)
    assert torch.equal(run("train", routes).attached["output"], plain("train", routes).attached["output"])
    assert (route.replayed, route.chosen) == (0, 0)


@pytest.mark.parametrize("shape", [(48, 1), (47, 2)])
def test_routes_of_another_model_are_refused(block_with_call, shape):
    _, run = block_with_call("qwen3_moe", route=torchs_route)
    with pytest.raises(PluginError, match="same model"):
        run("train", torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_run_replays_with_the_operation(toy_run, route, monkeypatch, recompute):
    """Rollout, old log-probabilities, training and recomputation of a whole run, compared with one that uses torch."""
    # a GPU adds gradients in any order, so after its first step two runs may sample different tokens
    steps = 1 if torch.cuda.is_available() else 2
    options = {"steps": steps, "family": "qwen3_moe", "recompute_activations": recompute}
    # on a GPU, too, the other operations are torch's in both runs
    monkeypatch.setattr(load, "use_kernels", lambda model: None)
    expected = toy_run(["r3"], **options).metrics
    route.clear()
    monkeypatch.setattr(
        load, "use_kernels", lambda model: use_operations(model, replace(operations_of(model), route=route))
    )
    found = toy_run(["r3"], **options).metrics
    assert route.replayed and route.chosen
    for one, other in zip(expected, found, strict=True):
        assert other["r3/routers_differing"] == pytest.approx(one["r3/routers_differing"], abs=0.05)
        for name in ("mismatch/abs_log_prob", "train/loss", "train/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
