"""Compiled linear layers have the values and gradients of ``nn.Linear``, and leave to it what they are not for."""

import pytest
import torch
from torch import nn

from miles_embedded.cpu import linear, operations

pytestmark = pytest.mark.usefixtures("kernels")

NAN, INF = float("nan"), float("inf")
#: In place of the measured ones, which may change.
ROWS, LARGEST = 64, 4096


@pytest.fixture(autouse=True)
def thresholds(monkeypatch):
    monkeypatch.setattr(linear, "ROWS", ROWS)
    monkeypatch.setattr(linear, "LARGEST", LARGEST)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def compiled(monkeypatch):
    """The shapes that went to the compiled product."""
    found, original = [], operations.linear
    monkeypatch.setattr(operations, "linear", lambda x, *rest: found.append(tuple(x.shape)) or original(x, *rest))
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [1, 15, 32, 70])
@pytest.mark.parametrize("inner", [1, 19, 64])
@pytest.mark.parametrize("rows", [1, 6, 13, 320])
def test_products(with_threads, near, rows, inner, columns, transposed):
    x, weight = randn(rows, inner), randn(*((columns, inner) if transposed else (inner, columns)), seed=1)
    (found,) = with_threads(lambda: [operations.linear(x, weight, transposed)])
    near(found, x.double() @ (weight.double().t() if transposed else weight.double()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 24), (1, 90, 33), (2, 250, 48), (65, 1)])
@pytest.mark.parametrize("columns", [1, 50])
def test_a_layer_has_the_values_and_gradients_of_a_plain_one(compare, compiled, shape, columns, bias):
    layer = linear.Linear(shape[-1], columns, bias=bias)
    tensors = [randn(*shape), randn(columns, shape[-1], seed=1), *([randn(columns, seed=2)] if bias else [])]

    def ours(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(("weight", "bias"), parameters, strict=False)), (x,))

    compare(ours, nn.functional.linear, tensors, by_torch=(1, 2)[: 1 + bias])
    assert compiled


def test_a_view_as_input(compare):
    layer = linear.Linear(20, 30, bias=False)

    def ours(x, weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x.transpose(0, 1),))

    compare(ours, lambda x, w: x.transpose(0, 1) @ w.t(), [randn(9, 8, 20), randn(30, 20, seed=1)], by_torch=(1,))


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "dtype"),
    [
        (ROWS - 1, 24, 16, torch.float32),
        (1, 24, 16, torch.float32),
        (0, 24, 16, torch.float32),
        (70, 0, 16, torch.float32),
        (70, 8, LARGEST // 8 + 1, torch.float32),
        (70, 24, 16, torch.float64),
        (70, 24, 16, torch.bfloat16),
    ],
)
def test_what_it_is_not_for_stays_with_torch(compiled, rows, inner, columns, dtype):
    layer = linear.Linear(1, columns).to(dtype)
    layer.weight = nn.Parameter(randn(columns, inner).to(dtype))
    x = randn(rows, inner, seed=1).to(dtype)
    out = layer(x.requires_grad_())
    assert not compiled
    assert torch.equal(out, nn.functional.linear(x, layer.weight, layer.bias))


def test_the_largest_weight_is_compiled(compiled):
    layer = linear.Linear(8, LARGEST // 8)
    with torch.no_grad():
        layer(randn(ROWS, 8))
    assert compiled == [(ROWS, 8)]


def test_a_weight_that_is_a_view(near):
    layer = linear.Linear(20, 30, bias=False)
    layer.weight = nn.Parameter(randn(20, 30).t())
    x = randn(70, 20, seed=1)
    near(layer(x).detach(), x.double() @ layer.weight.detach().double().t())


def test_only_what_is_trained_gets_a_gradient():
    layer, x = linear.Linear(12, 20), randn(70, 12)
    layer(x).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(20, 12))
    frozen, y = linear.Linear(12, 20).requires_grad_(False), x.clone().requires_grad_()
    frozen(y).sum().backward()
    assert frozen.weight.grad is None
    torch.testing.assert_close(y.grad, frozen.weight.sum(0).expand(70, 12))


def test_a_row_does_not_depend_on_the_others(same_bits):
    x, weight = randn(300, 37), randn(45, 37, seed=1)
    whole, some = operations.linear(x, weight, True), torch.tensor([299, 0, 17, 100, 100, 6, 5])
    assert same_bits(whole[some], operations.linear(x[some], weight, True))
    assert same_bits(whole[41:42], operations.linear(x[41:42], weight, True))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_not_finite_stays_in_its_row_and_column(value, transposed):
    x, weight = randn(20, 19), randn(19, 35, seed=1)
    x[7, 18] = value
    weight[3, 34] = value
    found = operations.linear(x, weight.t().contiguous() if transposed else weight, transposed)
    expected = torch.stack([(row.unsqueeze(1) * weight).sum(0) for row in x])
    assert not expected.isfinite().all() and expected.isfinite().any()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("processor", "faster", "expected"),
    [
        ("vendor_id: AuthenticAMD", False, True),
        ("vendor_id: AuthenticAMD", True, False),
        ("vendor_id: GenuineIntel", False, False),
        ("", False, False),
    ],
)
def test_it_pays_on_processors_whose_library_is_slow(monkeypatch, processor, faster, expected):
    monkeypatch.setattr(linear, "cpu_info", lambda: processor)
    monkeypatch.setattr(linear, "available", lambda: faster)
    assert linear.pays.__wrapped__() == expected
