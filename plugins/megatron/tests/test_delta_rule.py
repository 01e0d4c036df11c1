"""The kernels of gated delta nets in torch, compared with the recurrence token by token and with torch's convolution."""

import itertools

import torch
from torch.nn.functional import conv1d, silu

from miles_megatron.trainer.delta_rule import convolve, delta_rule, normalize

#: Samples shorter and longer than a chunk, of one token, and of whole chunks.
LENGTHS = [3, 1, 130, 64, 65]


def make_inputs(lengths, heads=2, key=8, value=6):
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    tokens = int(bounds[-1])

    def draw(*shape):
        return torch.randn(1, tokens, *shape, generator=generator)

    q, k = normalize(draw(heads, key)), normalize(draw(heads, key))
    g, beta = -draw(heads).exp() * 0.1, draw(heads).sigmoid()
    return [x.requires_grad_() for x in (q, k, draw(heads, value), g, beta)], bounds


def recur(q, k, v, g, beta):
    """The delta rule of one sample in float64: [tokens, heads, ...]."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    state, found = q.new_zeros(*k.shape[1:], v.shape[-1]), []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        found.append(torch.einsum("hkv,hk->hv", state, q[t]) / q.shape[-1] ** 0.5)
    return torch.stack(found)


def test_packed_samples_are_computed_as_the_recurrence_computes_each():
    inputs, bounds = make_inputs(LENGTHS)
    found, state = delta_rule(*inputs[:3], g=inputs[3], beta=inputs[4], cu_seqlens=bounds)
    assert state is None and found.shape == inputs[2].shape
    parts = [recur(*(x[0, start:end] for x in inputs)) for start, end in itertools.pairwise(bounds.tolist())]
    expected = torch.cat(parts)[None]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((found * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_strong_decays_neither_overflow_nor_lose_gradients():
    inputs, bounds = make_inputs([70])
    g = torch.full_like(inputs[3], -50.0).requires_grad_()
    found, _ = delta_rule(*inputs[:3], g=g, beta=inputs[4], cu_seqlens=bounds)
    expected = recur(*(x[0] for x in (*inputs[:3], g, inputs[4])))
    torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=1e-6)
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(found.sum(), [*inputs[:3], g, inputs[4]]))


def test_a_convolution_starts_at_every_sample():
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, 2, 3, 12], dtype=torch.int32)
    x, weight = torch.randn(1, 12, 5, generator=generator), torch.randn(5, 4, generator=generator)
    for bias in (None, torch.randn(5, generator=generator)):
        found, state = convolve(x=x, weight=weight, bias=bias, cu_seqlens=bounds)
        parts = []
        for start, end in itertools.pairwise(bounds.tolist()):
            part = conv1d(x[:, start:end].mT, weight[:, None], bias, padding=3, groups=5)[..., : end - start]
            parts.append(silu(part).mT)
        assert state is None
        torch.testing.assert_close(found, torch.cat(parts, 1), rtol=0, atol=1e-6)
