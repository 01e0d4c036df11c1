"""Compiled steps against float64, with one thread and with two."""

import pytest
import torch

from miles_cpu_kernels.library import why_not


@pytest.fixture
def kernels():
    """Skips where there are none."""
    if reason := why_not():
        pytest.skip(reason)


def bits(tensor):
    """Comparable even where it is NaN."""
    return tensor.detach().contiguous().view(torch.int32)


@pytest.fixture
def same_bits():
    """``same_bits(a, b)``: whether two float32 tensors are the same bit for bit."""
    return lambda a, b: torch.equal(bits(a), bits(b))


@pytest.fixture
def with_threads():
    """``with_threads(function)`` calls it with one and with two threads; results that differ in a bit fail, ``loose`` ones excepted."""
    before = torch.get_num_threads()

    def call(function, loose=()):
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            try:
                results.append(function())
            finally:
                torch.set_num_threads(before)
        for i, (one, two) in enumerate(zip(*results, strict=True)):
            assert i in loose or torch.equal(bits(one), bits(two)), f"result {i} depends on the number of threads"
        return results[0]

    return call


@pytest.fixture
def near():
    """``near(found, exact, tolerance)``: the largest error is at most that part of the largest number, or of one."""

    def check(found, exact, tolerance=2e-6):
        assert found.shape == exact.shape
        error, scale = (found.double() - exact).abs().max(), exact.abs().max().clamp(min=1)
        assert error <= tolerance * scale, f"{error:.2g} of {scale:.2g}"

    return check


@pytest.fixture
def compare(with_threads, near):
    """``compare(ours, exact, inputs)``: values, and gradients of all inputs, which ``exact`` gets in float64. ``by_torch``: numbers
    of the inputs whose gradients are PyTorch's own products, which may depend on the number of threads."""

    def check(ours, exact, inputs, tolerance=2e-6, by_torch=()):
        def results(function, dtype):
            leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
            out = function(*leaves)
            grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float32).to(dtype)
            return [out, *torch.autograd.grad(out, leaves, grad)]

        found = with_threads(lambda: results(ours, torch.float32), [1 + i for i in by_torch])
        for a, b in zip(found, results(exact, torch.float64), strict=True):
            near(a, b, tolerance)
        with torch.no_grad():
            again = with_threads(lambda: [ours(*inputs)])[0]
        assert torch.equal(bits(again), bits(found[0])), "it depends on whether gradients are recorded"

    return check
