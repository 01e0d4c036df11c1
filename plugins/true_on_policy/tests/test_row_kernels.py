"""Kernels with one program per row, on a GPU or in Triton's interpreter: a router's choice, and the log-probability of one token per row."""

import pytest
import torch

HERE = "cuda" if torch.cuda.is_available() else "cpu"


def rows_with_ties(count, width, dtype):
    """Random rows with equal entries; the first has entries of minus infinity, as masked groups of experts."""
    x = torch.randint(7, (count, width), generator=torch.Generator().manual_seed(0)).to(dtype) / 3
    x[0, ::2] = -torch.inf
    return x.to(HERE)


@pytest.mark.parametrize(("width", "k"), [(4, 4), (5, 2), (32, 4), (60, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_entries_are_those_of_a_stable_sort(triton, width, k, dtype):
    from miles_true_on_policy.choice import largest_entries

    x = rows_with_ties(9, width, dtype)
    values, index = largest_entries(x.view(3, 3, width), k)
    expected, places = x.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values.view(9, k), expected[:, :k]) and torch.equal(index.view(9, k), places[:, :k])
    assert all(torch.equal(largest_entries(x[i : i + 1], k)[1], places[i : i + 1, :k]) for i in range(9))


def test_the_largest_entries_have_the_gradient_of_a_sort(triton):
    from miles_true_on_policy.choice import largest_entries

    x = rows_with_ties(4, 12, torch.float32).clamp(min=-1).requires_grad_()
    weights = torch.rand(4, 3, device=HERE)
    functions = (lambda: largest_entries(x, 3)[0], lambda: x.sort(dim=-1, descending=True, stable=True).values[:, :3])
    one, two = (torch.autograd.grad((values() * weights).sum(), x)[0] for values in functions)
    assert torch.equal(one, two)


def test_places_of_rows_that_are_not_finite_are_valid(triton):
    from miles_true_on_policy.choice import largest_entries

    x = torch.tensor([[torch.nan] * 6, [1.0, torch.nan, 2.0, -torch.inf, torch.inf, torch.nan]], device=HERE)
    index = largest_entries(x, 4)[1].tolist()
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in index)
    assert index[1][:3] == [4, 2, 0]


def test_the_mode_chooses_by_the_kernel(triton, monkeypatch):
    from miles_true_on_policy import choice, products
    from miles_true_on_policy.mode import Invariant

    monkeypatch.setattr(products, "uses_kernels", lambda x: True)
    taken = []
    real = choice.largest_entries
    monkeypatch.setattr(choice, "largest_entries", lambda x, k: taken.append(k) or real(x, k))
    x = rows_with_ties(5, 12, torch.float32)
    with Invariant():
        found = [torch.topk(x, 3), x.topk(3, dim=1), x.topk(2, dim=0), x.topk(2, largest=False)]
    assert taken == [3, 3]
    for (values, index), (dim, k, descending) in zip(
        found, [(1, 3, True), (1, 3, True), (0, 2, True), (1, 2, False)], strict=True
    ):
        expected, places = x.sort(dim=dim, descending=descending, stable=True)
        assert torch.equal(values, expected.narrow(dim, 0, k)) and torch.equal(index, places.narrow(dim, 0, k))


@pytest.mark.parametrize("width", [3, 259, 5000])
def test_the_log_probability_of_a_token_has_the_bits_of_log_softmax(triton, width):
    from miles_true_on_policy.normalize import log_softmax, pick_log_softmax

    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(6, width, generator=generator)).to(HERE).requires_grad_()
    tokens = torch.randint(width, (6,), generator=generator).to(HERE)
    found, every = pick_log_softmax(x, tokens), log_softmax(x)
    assert torch.equal(found, every.gather(1, tokens[:, None])[:, 0])
    assert torch.equal(pick_log_softmax(x[2:3], tokens[2:3]), found[2:3])
    weights = torch.rand(6, generator=generator).to(HERE)
    expected = x.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    one, two = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(one, two.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [3, 259, 5000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("each", [False, True])
def test_logits_of_the_models_type_give_the_bits_of_converted_and_divided_ones(triton, width, dtype, each):
    """One temperature as in training, and one per row as in a decode step."""
    from miles_true_on_policy.log_probs import KernelLogProbs
    from miles_true_on_policy.normalize import log_softmax

    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(6, 2 * width, generator=generator)).to(HERE, dtype)[:, width:].requires_grad_()
    tokens = torch.randint(width, (6,), generator=generator).to(HERE)
    temperature = torch.linspace(0.5, 1.5, 6, device=HERE)[:, None] if each else 0.7
    divisor = temperature if each else torch.tensor(temperature, device=HERE)
    found = KernelLogProbs().of_logits(x, tokens, temperature)
    expected = log_softmax((x.float() / divisor).contiguous()).gather(1, tokens[:, None])[:, 0]
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    weights = torch.rand(6, generator=generator).to(HERE)
    one, two = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(one, two, rtol=1e-2 if dtype == torch.float16 else 1e-5, atol=1e-5)


def test_the_trainer_picks_log_probabilities(triton, monkeypatch):
    from miles_true_on_policy import normalize
    from miles_true_on_policy.log_probs import KernelLogProbs

    x, tokens = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).to(HERE), torch.tensor([3, 49, 0, 7])
    tokens = tokens.to(HERE)
    expected = normalize.log_softmax(x).gather(1, tokens[:, None])[:, 0]
    monkeypatch.setattr(normalize, "log_softmax", None)  # writes every entry
    assert torch.equal(KernelLogProbs()(x, tokens), expected)
