"""Compiled experts equal the usual expert written out in float64, and the grouped code that computes them elsewhere."""

import pytest
import torch
from torch import nn
from torch.nn.functional import silu
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from miles_cpu_kernels import experts
from miles_cpu_kernels.table import add_kernels
from miles_embedded.model import grouped_experts as grouped
from miles_embedded.model.experts import grouped_experts
from miles_embedded.model.operations import TORCH, use_operations
from miles_embedded.model.sorted_choices import sort_choices

pytestmark = pytest.mark.usefixtures("kernels")

NAN, INF = float("nan"), float("inf")
COUNT = 6
#: rows, choices, dim, inner
SIZES = [(1, 1, 1, 1), (7, 2, 24, 16), (40, 3, 33, 19), (500, 2, 20, 21)]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(rows, k, dim, inner):
    """Index [rows, k] among all experts but the second and the last, and hidden, weights, gate_up, down."""
    chosen = torch.rand(rows, COUNT - 2, generator=torch.Generator().manual_seed(5)).argsort(1)[:, :k]
    index = torch.tensor([0, 2, 3, 4])[chosen]
    gate_up, down = randn(COUNT, 2 * inner, dim, seed=2) / dim**0.5, randn(COUNT, dim, inner, seed=3) / inner**0.5
    return index, [randn(rows, dim), randn(rows, k, seed=1), gate_up, down]


def written_out(hidden, index, weights, gate_up, down):
    """A choice at a time for all rows, every row with matrices of its own."""
    out = 0
    for choice, weight in zip(index.unbind(1), weights.unbind(1), strict=True):
        gate, up = torch.einsum("rnd,rd->rn", gate_up[choice], hidden).chunk(2, 1)
        out = out + weight.unsqueeze(1) * torch.einsum("rdn,rn->rd", down[choice], silu(gate) * up)
    return out


@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients(compare, sizes):
    index, leaves = inputs(*sizes)
    compare(
        lambda hidden, *rest: experts.experts(hidden, index, *rest),
        lambda hidden, *rest: written_out(hidden, index, *rest),
        leaves,
        4e-6,
        by_torch=(2, 3),
    )


@pytest.mark.parametrize("sizes", SIZES)
def test_equal_to_the_grouped_experts(sizes):
    index, leaves = inputs(*sizes)
    hidden, weights, gate_up, down = (x.requires_grad_() for x in leaves)
    ours = experts.experts(hidden, index, weights, gate_up, down)
    theirs = grouped._SwiGLUExperts.apply(hidden, weights, gate_up, down, sort_choices(index, COUNT))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    grad = randn(*ours.shape, seed=7)
    for a, b in zip(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_an_expert_without_rows_gets_a_gradient_of_zero():
    index, leaves = inputs(9, 2, 12, 10)
    gate_up, down = (x.requires_grad_() for x in leaves[2:])
    experts.experts(leaves[0], index, leaves[1], gate_up, down).sum().backward()
    for grad in (gate_up.grad, down.grad):
        assert not grad[[1, 5]].any() and all(grad[i].any() for i in (0, 2, 3, 4))


def test_only_what_is_trained_gets_a_gradient():
    index, (hidden, weights, gate_up, down) = inputs(9, 2, 12, 10)
    hidden.requires_grad_()
    experts.experts(hidden, index, weights, gate_up, down).sum().backward()
    assert hidden.grad.any() and weights.grad is None and gate_up.grad is None and down.grad is None


def test_choices_and_rows_that_are_views(compare):
    index, (hidden, weights, gate_up, down) = inputs(40, 3, 33, 19)
    views = [hidden.t().contiguous(), weights.t().contiguous(), gate_up, down]
    turned = index.t().contiguous().t()
    compare(
        lambda h, w, *rest: experts.experts(h.t(), turned, w.t(), *rest),
        lambda h, w, *rest: written_out(h.t(), index, w.t(), *rest),
        views,
        4e-6,
        by_torch=(2, 3),
    )


def test_a_choice_that_is_no_expert_is_refused():
    index, (hidden, *rest) = inputs(7, 2, 24, 16)
    index[3, 1] = COUNT
    with pytest.raises(IndexError, match="not in the range 0 to 5"):
        experts.experts(hidden, index, *rest)


def test_a_row_does_not_depend_on_the_others(same_bits):
    index, (hidden, weights, *rest) = inputs(300, 2, 37, 21)
    whole, some = experts.experts(hidden, index, weights, *rest), torch.tensor([299, 0, 17, 100, 100, 6, 5])
    assert same_bits(whole[some], experts.experts(hidden[some], index[some], weights[some], *rest))


def test_the_gate_is_right_to_the_last_places():
    """Experts of one number each: gate and up are the row itself. With low gates the sigmoid is nothing but the exponential."""
    x = torch.linspace(-86, 88, 20_001).unsqueeze(1)
    one = torch.ones(1, 1, 1)
    index, weights = torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1)
    found = experts.experts(x, index, weights, torch.ones(1, 2, 1), one).double()
    exact = silu(x.double()) * x.double()
    assert ((found - exact).abs() <= 3 * 2.0**-23 * exact.abs()).all()


@pytest.mark.parametrize("value", [200.0, -200.0, 1e4, -1e4, INF, -INF, NAN])
def test_gates_that_are_far_out(value):
    """Each number of a row's gate is the row's only number, so that infinity is never multiplied by 0."""
    hidden, width = torch.tensor([[0.5], [value], [-2.0]]), 19
    index, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    gate_up, down = randn(1, 2 * width, 1).abs() + 0.1, randn(1, 1, width, seed=1).abs()
    gate_up[:, :width] = 1
    results = []
    for function in (experts.experts, written_out):
        leaf = hidden.clone().requires_grad_()
        out = function(leaf, index, weights, gate_up, down)
        results.append((out.detach(), *torch.autograd.grad(out.sum(), leaf)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_what_is_not_finite_stays_in_its_row():
    index, (hidden, *rest) = inputs(40, 3, 33, 19)
    expected = experts.experts(hidden, index, *rest)
    hidden[11, 32], hidden[20, 0] = NAN, INF
    found = experts.experts(hidden, index, *rest)
    others = [i for i in range(40) if i not in (11, 20)]
    assert torch.equal(found[others], expected[others])
    assert found[11].isnan().all() and not found[20].isfinite().any()


def module(dim=24, inner=16):
    config = Qwen3MoeConfig(hidden_size=dim, num_experts=COUNT, moe_intermediate_size=inner)
    made = Qwen3MoeExperts(config)
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=i) * 0.3)
    return made


@pytest.fixture
def taken(monkeypatch):
    """Calls of the compiled experts, on a processor that they are for."""
    found, original = [], experts.experts
    monkeypatch.setattr(experts, "experts", lambda *a: found.append(1) or original(*a))
    monkeypatch.setattr("miles_cpu_kernels.table.left_to_torch", lambda: "")
    return found


@pytest.mark.parametrize("gradient", [False, True])
def test_a_module_with_the_table_takes_them(taken, gradient):
    layer, (index, (hidden, weights, *_)) = module(), inputs(40, 2, 24, 16)
    with torch.set_grad_enabled(gradient):
        plain = grouped_experts(layer, hidden, index, weights)
        assert not taken
        use_operations(layer, add_kernels(TORCH))
        torch.testing.assert_close(grouped_experts(layer, hidden, index, weights), plain, rtol=1e-5, atol=1e-5)
    assert taken == [1]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.double(),
        lambda layer: setattr(layer, "act_fn", nn.GELU()),
        lambda layer: (
            setattr(layer, "has_bias", True)
            or setattr(layer, "gate_up_proj_bias", torch.ones(COUNT, 32))
            or setattr(layer, "down_proj_bias", torch.ones(COUNT, 24))
        ),
        lambda layer: setattr(layer, "down_proj", nn.Parameter(randn(COUNT, 24, 16).bfloat16().float().double())),
    ],
    ids=["float64", "another gate", "biases", "two dtypes"],
)
def test_a_module_that_is_none_of_the_usual_does_not(taken, change):
    layer, (index, (hidden, weights, *_)) = module(), inputs(40, 2, 24, 16)
    use_operations(layer, add_kernels(TORCH))
    change(layer)
    dtype = layer.gate_up_proj.dtype
    if layer.down_proj.dtype == dtype:
        grouped_experts(layer, hidden.to(dtype), index, weights.to(dtype))
    else:
        with pytest.raises(RuntimeError, match="dtype"):
            grouped_experts(layer, hidden, index, weights)
    assert not taken


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_weights_that_are_views_are_left_to_torch(taken, name):
    layer, (index, (hidden, weights, *_)) = module(), inputs(40, 2, 24, 16)
    with torch.no_grad():
        plain = grouped_experts(layer, hidden, index, weights)
        use_operations(layer, add_kernels(TORCH))
        turned = getattr(layer, name).transpose(1, 2).contiguous().transpose(1, 2)
        setattr(layer, name, nn.Parameter(turned))
        torch.testing.assert_close(grouped_experts(layer, hidden, index, weights), plain, rtol=1e-5, atol=1e-5)
    assert not taken


def test_large_experts_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(experts, "LARGEST", 3 * 64 * 1365)
    for inner, small in ((1365, True), (1366, False)):
        assert experts.fits(torch.empty(4, 2 * inner, 64), torch.empty(4, 64, inner)) is small


@pytest.mark.parametrize(
    ("machine", "onednn", "said"),
    [
        ("x86_64", False, ""),
        ("AMD64", False, ""),
        ("x86_64", True, "oneDNN is faster"),
        ("arm64", False, "(arm64)"),
    ],
)
def test_other_processors_leave_experts_to_torch_and_say_why(monkeypatch, machine, onednn, said):
    monkeypatch.setattr(experts.platform, "machine", lambda: machine)
    monkeypatch.setattr(experts, "available", lambda: onednn)
    reason = experts.left_to_torch.__wrapped__()
    assert said in reason and bool(said) == bool(reason)
    monkeypatch.setattr("miles_cpu_kernels.table.left_to_torch", lambda: reason)
    assert (add_kernels(TORCH).experts is TORCH.experts) == bool(said)


def test_any_integer_names_an_expert():
    index, leaves = inputs(40, 3, 33, 19)
    assert torch.equal(
        experts.experts(leaves[0], index.int(), *leaves[1:]), experts.experts(leaves[0], index, *leaves[1:])
    )
