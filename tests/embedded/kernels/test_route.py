"""The router's kernel: weights of the chosen and of given experts, and the gradient of the logits, against float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float32]
INDICES = [torch.int16, torch.int32, torch.uint8, torch.int64]
SIZES = [(7, 8, 2), (5, 60, 8), (4, 128, 8), (3, 5, 1), (3, 16, 16), (6, 6, 6), (1, 100, 4), (2, 1, 1)]


def normal(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def draw_experts(rows, experts, k, seed=5):
    return torch.rand(rows, experts, generator=torch.Generator().manual_seed(seed)).topk(k).indices.to(DEVICE)


def reference(logits, index, normalized):
    """Weights at ``index`` in float64. Normalized ones are a softmax of the gathered logits, so the others have a gradient of exactly 0."""
    if normalized:
        return logits.double().gather(-1, index).softmax(-1)
    return logits.double().softmax(-1).gather(-1, index)


def with_torch(logits, index, normalized):
    """The operations of the family's code."""
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, index)
    return (weights / weights.sum(-1, keepdim=True) if normalized else weights).to(logits.dtype)


def rounding(dtype):
    """Relative error of one rounding. Triton's interpreter truncates to BF16."""
    return torch.finfo(dtype).eps / (2 if DEVICE == "cuda" else 1)


def assert_near(found, expected, unit, logits):
    """Equal up to one rounding to the type of ``logits`` and some FP32 roundings of a number of size ``unit``."""
    # a GPU's exponential rounds its argument; below, it has no FP32 numbers of full precision
    distance = (logits.double().amax(-1, keepdim=True) - logits.double()).clamp(max=100).amax(-1, keepdim=True)
    places, single = 16 + 2 * distance, torch.finfo(torch.float32)
    error = (found.double() - expected).abs()
    limit = rounding(logits.dtype) * 1.001 * expected.abs() + places * single.eps * unit + 4 * single.tiny
    assert (error <= limit).all(), (error - limit).max()


def compare(logits, k, normalized, given=None):
    """Weights and gradient of the kernel against float64, whose error is at most about that of torch's operations."""
    from miles_embedded.kernels.route import choose

    leaf, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    weights, own = choose(leaf, k, normalized, given)
    index = own if given is None else given.long()
    expected = reference(wide, index, normalized)
    assert weights.dtype == logits.dtype and own.dtype == torch.int64 and not own.requires_grad
    assert_near(weights, expected, expected, logits)
    grad = normal(*weights.shape, dtype=logits.dtype, seed=9)
    (found,), (exact,) = torch.autograd.grad(weights, leaf, grad), torch.autograd.grad(expected, wide, grad.double())
    assert found.dtype == logits.dtype and found.shape == logits.shape
    share = wide.detach().softmax(-1)
    if normalized:
        share = torch.zeros_like(share).scatter_add(-1, index, expected.detach())
    unit = share * grad.double().abs().amax(-1, keepdim=True)  # of the terms of the gradient's difference
    assert_near(found, exact, unit, logits)
    plain = logits.clone().requires_grad_()
    (other,) = torch.autograd.grad(with_torch(plain, index, normalized), plain, grad)
    error, torchs = ((x.double() - exact).norm() for x in (found, other))
    small = 4 * torch.finfo(torch.float32).eps * grad.double().norm()
    assert error <= 2 * torchs + 2 * rounding(logits.dtype) * exact.norm() + small
    return weights, own, found


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "experts", "k"), SIZES)
def test_values_and_gradients(triton, rows, experts, k, dtype, normalized):
    logits = normal(rows, experts, dtype=dtype)
    own = compare(logits, k, normalized)[1]
    for index_dtype in INDICES:
        given = draw_experts(rows, experts, k).to(index_dtype)
        assert torch.equal(compare(logits, k, normalized, given)[1], own)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_inputs(triton, dtype, normalized):
    logits = normal(8, 20, dtype=dtype)
    logits[0] = 0.25  # all equal
    logits[1, 3:9] = logits[1].max() + 1  # more equal ones than are chosen
    logits[2] *= 1e4
    logits[3] *= 1e-6
    logits[4] += 3e4
    logits[5, :10] = -torch.inf
    logits[6, 1:] = -torch.inf
    logits[7] = normal(20, dtype=dtype, scale=20)
    _, own, gradient = compare(logits, 4, normalized)
    assert own[0].tolist() == [0, 1, 2, 3] and own[1].tolist() == [3, 4, 5, 6]
    assert gradient.isfinite().all() and not gradient[5, :10].any()
    # an expert without any probability next to experts with some
    given = torch.tensor([[19, 18, 0, 17]] * 8, device=DEVICE)
    kept = [0, 1, 3, 4, 5, 7]  # elsewhere all four shares may be 0, whose quotient is no number in torch either
    compare(logits[kept], 4, normalized, given[kept])


@pytest.mark.parametrize("normalized", [True, False])
def test_shares_that_vanish_next_to_the_largest(triton, normalized):
    """The experts that were not given have no gradient of normalized weights, however much larger their share is."""
    logits = torch.zeros(1, 6, device=DEVICE)
    logits[0, 5] = 80.0  # the others have 2e-35
    _, _, gradient = compare(logits, 2, normalized, torch.tensor([[1, 4]], device=DEVICE))
    assert gradient.isfinite().all()
    if normalized:
        assert not gradient[0, [0, 2, 3, 5]].any() and gradient[0, [1, 4]].all()


def test_one_normalized_choice_has_no_gradient(triton):
    *_, gradient = compare(normal(50, 12, scale=3), 1, True)
    assert gradient.abs().max() < 1e-6  # a GPU's quotient of equal numbers may be one rounding from 1


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "experts", "k"), [(7, 8, 2), (5, 60, 8), (3, 16, 16)])
def test_own_experts_that_are_given_change_no_bit(triton, rows, experts, k, dtype, normalized):
    """With gradient, without, and with the own choice as the given one."""
    from miles_embedded.kernels.route import choose

    logits = normal(rows, experts, dtype=dtype, scale=4)
    weights, own = choose(logits, k, normalized)
    runs = [partial(choose, given=own), partial(choose, given=own.to(torch.uint8))]
    for run in (choose, *runs):
        for logit in (logits, logits.clone().requires_grad_()):
            found, index = run(logit, k, normalized)
            assert torch.equal(found, weights) and torch.equal(index, own)
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    plain, replayed = choose(leaves[0], k, normalized), choose(leaves[1], k, normalized, own)
    grad = normal(rows, k, dtype=dtype, seed=9)
    first, second = (
        torch.autograd.grad(x, leaf, grad)[0] for (x, _), leaf in zip((plain, replayed), leaves, strict=True)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("index_dtype", INDICES)
@pytest.mark.parametrize("order", ["rows", "layers"])
def test_one_layer_of_a_record_is_read_in_place(triton, index_dtype, order):
    logits, records = normal(5, 12), torch.stack([draw_experts(5, 12, 3, seed) for seed in range(4)], 1).to(index_dtype)
    if order == "layers":
        records = records.transpose(0, 1).contiguous().transpose(0, 1)
    for layer in range(4):
        given = records[:, layer]
        assert given.data_ptr() == records.data_ptr() + layer * records.stride(1) * records.element_size()
        compare(logits, 3, True, given)
    compare(logits, 3, False, records[:, 1].t().contiguous().t())  # places further apart than rows


def test_logits_with_strides(triton):
    compare(normal(12, 6).t(), 2, True)
    compare(normal(6, 24)[:, ::2], 2, False)


def test_an_expert_that_is_given_twice(triton):
    logits, given = normal(3, 9), torch.tensor([[2, 2, 5], [0, 8, 0], [1, 1, 1]], device=DEVICE)
    for normalized in (True, False):
        compare(logits, 3, normalized, given)


def test_no_rows(triton):
    from miles_embedded.kernels.route import choose

    for given in (None, torch.zeros(0, 2, dtype=torch.int16, device=DEVICE)):
        leaf = normal(0, 8).requires_grad_()
        weights, index = choose(leaf, 2, True, given)
        assert weights.shape == index.shape == (0, 2)
        weights.sum().backward()
        assert leaf.grad.shape == (0, 8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_weights(triton, value):
    from miles_embedded.kernels.route import choose

    logits = normal(3, 11)
    logits[1, 4] = value
    for given in (None, draw_experts(3, 11, 2)):
        leaf = logits.clone().requires_grad_()
        weights, index = choose(leaf, 2, True, given)
        assert (
            weights.isnan().all(1).tolist() == [False, True, False] and 0 <= int(index.min()) <= int(index.max()) < 11
        )
        weights.sum().backward()
        assert leaf.grad.isnan().any(1).tolist() == [False, True, False]


def test_weights_that_no_loss_reads(triton):
    from miles_embedded.kernels.route import choose

    leaf = normal(3, 8).requires_grad_()
    logits = leaf * 1
    choose(logits, 2, True)
    logits.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))


def test_sizes_that_the_kernel_does_not_take_are_computed_by_torch(triton):
    from miles_embedded.kernels.route import MOST_CHOSEN, MOST_EXPERTS, can_choose
    from miles_embedded.model.gpu_operations import route

    assert can_choose(normal(2, MOST_EXPERTS), MOST_CHOSEN)
    for experts, k in ((MOST_EXPERTS + 1, 2), (30, MOST_CHOSEN + 1)):
        logits = normal(2, experts)
        assert not can_choose(logits, k)
        _, own = route(logits, k, True)
        given = draw_experts(2, experts, k)
        for index, weights in ((own, route(logits, k, True)[0]), (given, route(logits, k, True, given.int())[0])):
            torch.testing.assert_close(weights, with_torch(logits, index, True), rtol=1e-6, atol=0)
