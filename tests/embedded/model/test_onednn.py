"""Products by the faster library: the same numbers as torch's, to rounding, forward and backward."""

import copy

import pytest
import torch
from torch import nn

from miles_embedded.model import onednn

needs_packs = pytest.mark.skipif(
    not (onednn.mkl_is_slow() and onednn._has_vectors()),
    reason="weights are packed on AMD processors with 512-bit vectors",
)
needs_fast_path = pytest.mark.skipif(not onednn.available(), reason="this processor's MKL is the faster library")


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100, 1965])
@pytest.mark.parametrize(("left", "right"), [(False, False), (True, False), (False, True), (True, True)])
def test_times_is_the_matrix_product(rows, left, right):
    torch.manual_seed(rows)
    a = torch.randn(48, rows).t() if left else torch.randn(rows, 48)
    b = torch.randn(40, 48).t() if right else torch.randn(48, 40)
    exact = a.double() @ b.double()
    assert (onednn.matmul(a, b) - exact).abs().max() < 1e-4


def test_padded_sizes_are_few_and_at_most_an_eighth_larger():
    sizes = {n: onednn.pad_rows(n) for n in range(1, 5000)}
    assert all(n <= size <= n * 1.125 + 1 for n, size in sizes.items())
    if onednn.available():
        assert len({size for n, size in sizes.items() if n >= 1024}) <= 24
        assert all(sizes[n] == n for n in range(1, 32))


@needs_fast_path
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(70, 24), (1, 70, 24), (2, 64, 24), (5, 24)])
def test_a_fast_linear_has_the_values_and_gradients_of_a_plain_one(bias, shape):
    torch.manual_seed(0)
    plain = nn.Linear(24, 16, bias=bias)
    fast = nn.Sequential(nn.Linear(24, 16, bias=bias))
    fast[0].load_state_dict(plain.state_dict())
    onednn.use_fast_linear(fast)
    assert type(fast[0]) is nn.Linear and "forward" in vars(fast[0])
    x, y = (torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_() for _ in range(2))
    grad = torch.randn(*shape[:-1], 16)
    plain(x).backward(grad)
    fast(y).backward(grad)
    torch.testing.assert_close(plain(x), fast(y), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not onednn.mkl_is_slow(), reason="on this processor the plain product is the faster one")
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_have_the_values_of_a_plain_linear(bias, monkeypatch):
    plain = nn.Linear(512, 256, bias=bias)
    fast = nn.Sequential(copy.deepcopy(plain))
    onednn.use_fast_linear(fast)
    taken = []
    turned = onednn._multiply_left
    monkeypatch.setattr(onednn, "_multiply_left", lambda module, x, rows: taken.append(rows) or turned(module, x, rows))
    with torch.no_grad():
        for shape in ((1, 512), (3, 512), (1, 7, 512), (512,), (8, 512), (1, 31, 512), (32, 512)):
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-5)
    assert taken == [1, 3, 7, 1]
    fast(x.requires_grad_()).sum().backward()  # and with a gradient, torch's


@needs_packs
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_have_the_values_of_a_plain_linear_and_follow_it(bias):
    plain = nn.Linear(256, 320, bias=bias)
    fast = nn.Sequential(copy.deepcopy(plain))
    onednn.use_fast_linear(fast)
    packs = onednn.Packs()
    with torch.no_grad(), packs.activate():
        for shape in ((4, 256), (1, 31, 256), (127, 256), (3, 256), (128, 256)):
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-5)
        x = torch.randn(8, 256)
        for layer in (plain, fast[0]):
            layer.weight.mul_(2)
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)
        fast[0].weight.data.mul_(2)  # which nothing but the engine can know of
        packs.clear()
        torch.testing.assert_close(fast(x), 2 * plain(x) - (plain.bias if bias else 0), rtol=1e-4, atol=1e-4)
    assert onednn._packs.get() is None  # a trainer's products are what they were


@needs_packs
def test_weights_that_would_take_too_much_memory_are_not_packed(monkeypatch):
    monkeypatch.setattr(onednn, "_MOST", 256 * 256 * 4)
    packs, layers = onednn.Packs(), [nn.Linear(256, 256), nn.Linear(256, 256)]
    assert [packs.get(layer) is None for layer in layers * 2] == [False, True, False, True]
    packs.clear()
    assert packs.get(layers[1]) is not None


def test_other_dtypes_stay_with_torch():
    x = torch.randn(64, 8, dtype=torch.float64)
    assert not onednn.use_onednn(x, 64)
    assert not onednn.use_onednn(x.bfloat16(), 64)
    assert torch.equal(onednn.matmul(x, x.t()), x @ x.t())


@pytest.mark.parametrize(
    ("vendor", "family", "wide"),
    [("AuthenticAMD", 26, True), ("AuthenticAMD", 25, False), ("GenuineIntel", 26, False), ("AuthenticAMD", 27, True)],
)
def test_onednn_is_chosen_by_the_width_of_the_processors_units(vendor, family, wide):
    text = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\n"
    assert onednn.has_wide_units(text) is wide
    assert not onednn.has_wide_units("processor\t: 0\n")


@needs_fast_path
def test_the_result_can_be_changed_in_place_where_gradients_are_needed():
    """Gemma 3n multiplies what its projection returned in place."""
    torch.manual_seed(0)
    plain, fast = (torch.nn.Linear(64, 96, bias=False) for _ in range(2))
    fast.load_state_dict(plain.state_dict())
    onednn.use_fast_linear(fast)
    x, results = torch.randn(1, 64, 64), []
    for module in (plain, fast):
        out = module(x)
        out *= 2.0
        out.square().sum().backward()
        results.append(module.weight.grad)
    torch.testing.assert_close(*results)
