"""The kernel of Mamba-2 in torch, compared with the recurrence token by token and with torch's convolution."""

import itertools

import pytest
import torch
from torch.nn.functional import conv1d, silu, softplus

from miles_megatron.trainer.scan import convolve, convolve_and_scan, scan

#: Samples shorter and longer than a chunk, of one token, and of whole chunks.
LENGTHS = [3, 1, 21, 8, 9]
CHUNK, HEADS, SIZE, GROUPS, STATE, WIDTH = 8, 4, 6, 2, 5, 4
INNER, CHANNELS = HEADS * SIZE, HEADS * SIZE + 2 * GROUPS * STATE


def make_inputs(lengths):
    """Arguments with a gradient, [samples + 1] bounds and the sample of each token."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    shapes = ((1, tokens, INNER + CHANNELS + HEADS), (CHANNELS, WIDTH), (CHANNELS,), (HEADS,), (HEADS,), (HEADS,))
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    found[4] = -found[4].exp()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    samples = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(torch.int32)
    return [x.requires_grad_() for x in found], bounds.tolist(), samples[None]


def recur(joined, weight, bias, dt_bias, a, d):
    """The mixer over one sample, token by token in float64: [tokens, heads x size]."""
    joined, weight, bias, dt_bias, a, d = (x.double() for x in (joined, weight, bias, dt_bias, a, d))
    gate, channels, steps = joined.split([INNER, CHANNELS, HEADS], -1)
    convolved = conv1d(channels.T[None], weight[:, None], bias, padding=WIDTH - 1, groups=CHANNELS)[0, :, : len(joined)]
    x, b, c = silu(convolved.T).split([INNER, GROUPS * STATE, GROUPS * STATE], -1)
    x, (b, c) = x.unflatten(-1, (HEADS, SIZE)), (part.unflatten(-1, (GROUPS, STATE)) for part in (b, c))
    state, found = x.new_zeros(HEADS, SIZE, STATE), []
    for t in range(len(joined)):
        step = softplus(steps[t] + dt_bias)
        rows = [b[t].repeat_interleave(HEADS // GROUPS, 0), c[t].repeat_interleave(HEADS // GROUPS, 0)]
        state = (step * a).exp()[:, None, None] * state + (step[:, None] * x[t])[..., None] * rows[0][:, None]
        found.append((state * rows[1][:, None]).sum(-1) + d[:, None] * x[t])
    return torch.stack(found).flatten(1) * silu(gate)


@pytest.mark.parametrize("chunk", [CHUNK, 64, 1])
def test_packed_samples_are_computed_as_the_recurrence_computes_each(chunk):
    inputs, bounds, samples = make_inputs(LENGTHS)
    found = convolve_and_scan(*inputs, chunk_size=chunk, headdim=SIZE, ngroups=GROUPS, seq_idx=samples)
    parts = [recur(inputs[0][0, start:end], *inputs[1:]) for start, end in itertools.pairwise(bounds)]
    expected = torch.cat(parts)[None]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((found * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() <= 1e-5 * other.abs().max()


def test_strong_decays_neither_overflow_nor_lose_gradients():
    inputs, _, samples = make_inputs([20])
    inputs[4] = torch.full((HEADS,), -80.0, requires_grad=True)
    found = convolve_and_scan(*inputs, chunk_size=CHUNK, headdim=SIZE, ngroups=GROUPS, seq_idx=samples)
    torch.testing.assert_close(found[0].double(), recur(inputs[0][0], *inputs[1:]), rtol=1e-5, atol=1e-5)
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(found.sum(), inputs))


def test_a_neighbour_changes_neither_a_result_nor_a_gradient():
    """Bit for bit, also where its values are large."""
    inputs, bounds, samples = make_inputs(LENGTHS)
    found = []
    for value in (1.0, 1e4):
        with torch.no_grad():
            inputs[0][0, : bounds[2]] = value
        out = convolve_and_scan(*inputs, chunk_size=CHUNK, headdim=SIZE, ngroups=GROUPS, seq_idx=samples)
        own = out[0, bounds[2] : bounds[3]]
        (grad,) = torch.autograd.grad(own.square().sum(), inputs[:1])
        assert not grad[0, : bounds[2]].any() and not grad[0, bounds[3] :].any()
        found.append((own.detach(), grad[0, bounds[2] : bounds[3]]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_without_the_bounds_of_samples_they_would_mix():
    """Able to fail: states and convolutions that continue from the previous sample give other results."""
    inputs, bounds, samples = make_inputs(LENGTHS)
    joined = torch.zeros(bounds[-1], dtype=torch.long)
    starts = torch.tensor(bounds)[samples[0].long()]
    with torch.no_grad():
        x, decay = torch.randn(bounds[-1], HEADS, SIZE), -torch.rand(bounds[-1], HEADS)
        b, c = torch.randn(2, bounds[-1], HEADS, STATE)
        scanned = [scan(x, decay, b, c, first, CHUNK) for first in (starts, joined)]
        convolved = [convolve(inputs[0][0, :, :CHANNELS], *inputs[1:3], first) for first in (starts, joined)]
    for one, other in (scanned, convolved):
        assert torch.equal(one[: bounds[1]], other[: bounds[1]])
        assert (one - other)[bounds[1] :].abs().max() > 0.1
