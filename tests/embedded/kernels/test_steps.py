"""The kernels of a model's steps and of sampling against torch: on a GPU, or by Triton's interpreter where Triton is installed."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from miles_embedded.engine.sampling import Params, sample_on_device, stream_start, uniform
from miles_embedded.engine.static_batch import StaticBatch
from miles_embedded.model.sorted_choices import sort_choices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: The interpreter's bfloat16 is not that of a GPU.
DTYPES = [torch.bfloat16, torch.float32] if DEVICE == "cuda" else [torch.float32]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found, expected, dtype):
    places = 4 * torch.finfo(dtype).eps
    assert (found.double() - expected.double()).norm() <= places * expected.double().norm()
    assert found.shape == expected.shape and found.dtype == expected.dtype


def compare(function, reference, inputs, dtype):
    """Values, and the gradients of all inputs."""
    given = [x.clone().requires_grad_() for x in inputs]
    expected = reference(*given)
    grad = normal(*expected.shape, dtype=dtype, seed=9)
    grads = torch.autograd.grad(expected, given, grad)
    with torch.no_grad():
        close(function(*given), expected, dtype)
    found = function(*given)
    close(found, expected, dtype)
    for a, b in zip(torch.autograd.grad(found, given, grad), grads, strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 24), (1, 3, 4, 16), (2, 1536)])
def test_norm(triton, shape, dtype):
    from miles_embedded.kernels.norm import rms_norm

    def reference(x, weight):
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-3)).to(dtype)

    inputs = [normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)]
    compare(lambda x, w: rms_norm(x, w, 1e-3), reference, inputs, dtype)
    wide = normal(1, 5, 7 * shape[-1], dtype=dtype)  # heads that are a part of a product's columns
    part = wide[..., shape[-1] : 4 * shape[-1]].view(1, 5, 3, shape[-1])
    close(rms_norm(part, inputs[1], 1e-3), reference(part, inputs[1]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 24), (2, 1536), (0, 16)])
def test_norm_of_a_sum(triton, shape, dtype):
    from miles_embedded.kernels.norm import rms_norm

    x, other = (normal(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = normal(shape[-1], dtype=dtype, seed=2)
    total, found = rms_norm.of_sum(x, other, weight, 1e-3)
    assert torch.equal(total, x + other) and torch.equal(found, rms_norm(x + other, weight, 1e-3))
    apart = normal(2 * shape[0], *shape[1:], dtype=dtype)[::2]
    assert torch.equal(rms_norm.of_sum(x, apart, weight, 1e-3)[0], x + apart)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("both", [False, True])
def test_gradient_of_a_norm_of_a_sum(triton, both, dtype):
    from miles_embedded.kernels.norm import rms_norm

    def join(total, normed):
        return torch.cat([total, normed], -1) if both else normed

    inputs = [normal(1, 5, 24, dtype=dtype, seed=seed) for seed in (0, 1)] + [normal(24, dtype=dtype, seed=2)]
    reference = lambda x, other, weight: join(x + other, rms_norm(x + other, weight, 1e-3))  # noqa: E731
    compare(lambda x, other, weight: join(*rms_norm.of_sum(x, other, weight, 1e-3)), reference, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [3, 40])
def test_rotation_of_both_keeps_the_layout(triton, heads, dtype):
    from miles_embedded.kernels.rotation import rotate

    cosine, sine = normal(1, 5, 24, dtype=dtype, seed=1), normal(1, 5, 24, dtype=dtype, seed=2)

    def reference(x):
        a, b = x.chunk(2, -1)
        return x * cosine + torch.cat([-b, a], -1) * sine

    x = normal(1, 5, heads, 24, dtype=dtype).transpose(1, 2)
    few = normal(1, 2, 5, 24, dtype=dtype, seed=3)
    for which in (0, 1):
        compare(lambda x, w=which: rotate(*((x, few), (few, x))[w], cosine, sine)[w], reference, [x], dtype)
    both = rotate(x, few, cosine, sine)
    assert (both[0].stride(), both[1].stride()) == (x.stride(), few.stride())
    compare(
        lambda x, y: torch.cat(rotate(x, y, cosine, sine), 1),
        lambda x, y: torch.cat([reference(x), reference(y)], 1),
        [x, few],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_of_two_tensors_and_of_one(triton, dtype):
    from miles_embedded.kernels.swiglu import swiglu, swiglu_of_halves

    inputs = [normal(1, 5, 1100, dtype=dtype), normal(1, 5, 1100, dtype=dtype, seed=1)]
    compare(swiglu, lambda a, b: silu(a) * b, inputs, dtype)
    both = [normal(5, 48, dtype=dtype)]
    compare(lambda x: swiglu(*x.chunk(2, -1)), lambda x: silu(x[:, :24]) * x[:, 24:], both, dtype)
    compare(swiglu_of_halves, lambda x: silu(x[:, :24]) * x[:, 24:], both, dtype)


@pytest.mark.parametrize(("rows", "k", "experts"), [(3, 2, 8), (300, 4, 5)])
def test_experts_places_and_sum(triton, rows, k, experts):
    from miles_embedded.kernels.experts import sorted_places, sum_choices, weighted_sum, weighted_sum_gradients

    generator = torch.Generator().manual_seed(0)
    index = torch.rand(rows, experts, generator=generator).topk(k).indices.to(DEVICE)
    choices = sort_choices(index, experts)
    order, place, row, ends = sorted_places(index, experts)
    pairs = [(order, choices.order), (place, choices.place), (row, choices.row), (ends, choices.ends)]
    assert all(torch.equal(found, expected) for found, expected in pairs)
    x, weights = normal(rows * k, 40, dtype=DTYPES[0]), normal(rows, k, dtype=DTYPES[0], seed=1)
    of_row = x.double()[place]  # [rows, k, dim]
    close(weighted_sum(x, weights, place), (of_row * weights.double()[..., None]).sum(1).to(x.dtype), DTYPES[0])
    close(sum_choices(x, place), of_row.sum(1).to(x.dtype), DTYPES[0])
    grad = normal(rows, 40, dtype=DTYPES[0], seed=2)
    grad_x, grad_weights = weighted_sum_gradients(grad, x, weights, order)
    wide = grad.double()[row]
    close(grad_x, (wide * weights.double().reshape(-1)[order, None]).to(x.dtype), DTYPES[0])
    close(grad_weights, (of_row * grad.double()[:, None]).sum(-1).to(x.dtype), DTYPES[0])


@pytest.mark.parametrize(("rows", "k", "experts"), [(3, 2, 8), (150, 4, 5)])
def test_products_of_experts(triton, rows, k, experts):
    from miles_embedded.kernels.grouped import gated_product, product

    generator = torch.Generator().manual_seed(0)
    index = torch.rand(rows, experts, generator=generator).topk(k).indices.to(DEVICE)
    choices, dim, inner = sort_choices(index, experts), 80, 72
    x = normal(rows, dim, dtype=DTYPES[0])
    gate_up, down = (
        normal(experts, 2 * inner, dim, dtype=DTYPES[0], seed=1),
        normal(experts, dim, inner, dtype=DTYPES[0], seed=2),
    )
    expert = index.reshape(-1)[choices.order]
    gate, up = torch.einsum("pd,pid->pi", x[choices.row].double(), gate_up[expert].double()).chunk(2, -1)
    middle = gated_product(x, gate_up, choices.row, choices.ends)
    close(middle, (silu(gate) * up).to(DTYPES[0]), DTYPES[0])
    expected = torch.einsum("pi,pdi->pd", middle.double(), down[expert].double())
    close(product(middle, down, choices.ends), expected.to(DTYPES[0]), DTYPES[0])


@pytest.mark.parametrize("counts", [(70, 0, 200, 1), (64, 128, 0, 0)])
@pytest.mark.parametrize(("width", "depth"), [(200, 264), (128, 72)])
def test_gradients_of_the_weights_of_experts(triton, counts, width, depth):
    from miles_embedded.kernels.weight_gradients import weight_gradients

    left, right = normal(sum(counts), width, dtype=DTYPES[0]), normal(sum(counts), depth, dtype=DTYPES[0], seed=1)
    ends = torch.tensor(counts).cumsum(0).int().to(DEVICE)
    expected = [a.double().T @ b.double() for a, b in zip(left.split(counts), right.split(counts), strict=True)]
    close(weight_gradients(left, right, ends), torch.stack(expected).to(DTYPES[0]), DTYPES[0])
    total = torch.full((len(counts), width, depth), torch.nan, device=DEVICE)
    for times in (1, 2):
        assert weight_gradients(left, right, ends, total, add=times > 1) is total
        wide = times * torch.stack(expected)
        assert (total - wide).norm() < 1e-5 * wide.norm()
    assert not weight_gradients(left[:0], right[:0], 0 * ends).any()


def test_two_parts_of_attention_are_merged_and_added(triton):
    from miles_embedded.kernels.parts import add_rows, merge_parts

    dtype, rows = DTYPES[0], torch.tensor([1, 4, 5], device=DEVICE)
    out, far = normal(7, 5, 24, dtype=dtype), normal(3, 5, 24, dtype=dtype, seed=1)
    sums, far_sums = normal(5, 7, seed=2), normal(5, 3, seed=3)
    both = torch.logaddexp(sums[:, rows], far_sums)
    expected = out.clone()
    near, other = ((x - both).exp().t().unsqueeze(-1) for x in (sums[:, rows], far_sums))
    expected[rows] = (out[rows] * near + far * other).to(dtype)
    added = out.clone()
    added[rows] += far
    target = out.clone()
    add_rows(target, rows, far)
    assert torch.equal(target, added)
    expected_sums = sums.index_copy(1, rows, both)
    merge_parts(out, sums, far, far_sums, rows)
    close(out, expected, dtype)
    close(sums, expected_sums, torch.float32)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(5, 2), (60, 8)])
def test_the_largest_of_a_softmax(triton, experts, k, normalized):
    from miles_embedded.kernels.route import choose

    logits = normal(7, experts, dtype=DTYPES[0])
    logits[2] = 0.5  # of equal ones the first
    expected, index = logits.softmax(-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    expected = expected[:, :k] / expected[:, :k].sum(-1, keepdim=True) if normalized else expected[:, :k]
    weights, chosen = choose(logits, k, normalized)
    assert torch.equal(chosen, index[:, :k])
    close(weights, expected.to(logits.dtype), logits.dtype)


def draw_tokens(logits, temperatures, greedy, seed=7):
    from miles_embedded.kernels.draw import draw_rows

    rows = len(logits)
    batch = StaticBatch(rows + 3, torch.device(DEVICE))
    batch.temperature[:rows], batch.greedy[:rows] = temperatures, greedy
    batch.keys[:rows] = torch.arange(rows) * 977 - 3
    batch.prompt_lengths[:rows], batch.lengths[:rows] = torch.arange(rows) * 5 + 2, torch.arange(rows) * 3
    u = uniform(seed, batch.keys, batch.prompt_lengths + batch.lengths + 1)[:rows]
    lengths = batch.lengths.clone()
    lengths[:rows] += 1
    draw_rows(logits, batch, stream_start(seed))
    assert torch.equal(batch.lengths, lengths) and torch.equal(batch.results[0], batch.tokens.double())
    assert not batch.results[:, rows:].any()
    return batch.tokens[:rows], batch.results[1, :rows], u


@pytest.mark.parametrize("vocab", [50, 4096, 9001])
def test_tokens_drawn_are_those_of_the_plain_sampler(triton, vocab):
    rows = 40
    logits = 3 * normal(rows, vocab, dtype=DTYPES[0])
    logits[1, : vocab // 2] = -torch.inf
    temperatures = torch.linspace(0.3, 2, rows, device=DEVICE)[:, None]
    greedy = (torch.arange(rows, device=DEVICE) % 4 == 3).long()
    temperatures[greedy == 1] = 1.0
    logits[3, 7] = logits[3, 5] = logits[3].max() + 1  # of equal ones the first
    tokens, log_probs, u = draw_tokens(logits, temperatures, greedy)
    expected, chosen = sample_on_device(logits, Params(temperatures, greedy=greedy[:, None].bool()), u)
    assert torch.equal(tokens, expected) and int(tokens[3]) == 5
    torch.testing.assert_close(log_probs.float(), chosen, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_not_a_number(triton, value):
    logits = normal(3, 50)
    logits[1, 20] = value
    ones = torch.ones(3, 1, device=DEVICE)
    tokens, log_probs, _ = draw_tokens(logits, ones, torch.zeros(3, dtype=torch.int64, device=DEVICE))
    assert log_probs.isnan().tolist() == [False, True, False] and 0 <= int(tokens.min()) <= int(tokens.max()) < 50


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("rows", "width"), [(3, 50), (2, 9001), (0, 16)])
def test_log_probs_of_tokens(triton, rows, width, temperature):
    from miles_embedded.kernels.log_probs import log_probs

    dtype = DTYPES[0]
    logits, tokens = 5 * normal(rows, width, dtype=dtype), torch.arange(rows, device=DEVICE) * 7 % width
    logits[:1, : width // 2] = -torch.inf  # whole blocks without a token
    tokens[:1] = width - 1

    def reference(x):
        return (x.double() / temperature).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)

    given, plain = (logits.clone().requires_grad_() for _ in range(2))
    found, expected = log_probs.of_logits(given, tokens, temperature), reference(plain)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, log_probs.of_logits(logits, tokens, temperature))
    grad = normal(rows, seed=1)
    (of_kernel,), (of_reference,) = (
        torch.autograd.grad(out, x, grad.to(out.dtype)) for out, x in ((found, given), (expected, plain))
    )
    torch.testing.assert_close(of_kernel, of_reference, rtol=4 * torch.finfo(dtype).eps + 1e-5, atol=1e-6)
    every_second = normal(2 * rows, width, dtype=dtype)[::2]
    assert torch.equal(log_probs(every_second, tokens), log_probs(every_second.contiguous(), tokens))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_log_probs_of_logits_that_are_not_finite_are_not_a_number(triton, value):
    from miles_embedded.kernels.log_probs import log_probs

    logits = normal(3, 50)
    logits[1, 20] = value
    assert log_probs(logits, torch.full((3,), 4, device=DEVICE)).isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_heads", "heads", "dim", "width"), [(2, 4, 16, 8), (1, 3, 24, 40), (2, 2, 128, 128)])
def test_delta_rule(triton, key_heads, heads, dim, width, dtype):
    from miles_embedded.kernels.delta_rule import advance_delta_rule

    rows, slots = 3, 8
    mixed = normal(
        rows, 2 * key_heads * dim + heads * width, dtype=dtype
    )  # query, key and value are parts of one product
    query, key, value = mixed[:, None].split([key_heads * dim, key_heads * dim, heads * width], -1)
    query, key = (x.unflatten(-1, (key_heads, dim)) for x in (query, key))
    value = value.unflatten(-1, (heads, width))
    decay, beta = -normal(rows, 1, heads, seed=1).abs(), normal(rows, 1, heads, dtype=dtype, seed=2).sigmoid()
    slab = normal(slots, heads, dim, width, seed=3)
    before, after = (torch.tensor(x, device=DEVICE) for x in ([6, 0, 3], [7, 1, 2]))
    q, k = (x.double().repeat_interleave(heads // key_heads, 2)[:, 0] for x in (query, key))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = slab[before].double() * decay[:, 0].double().exp()[..., None, None]
    change = (value[:, 0].double() - torch.einsum("rhkv,rhk->rhv", state, k)) * beta[:, 0].double()[..., None]
    state = state + k[..., None] * change[:, :, None]
    expected = torch.einsum("rhkv,rhk->rhv", state, q)[:, None] * dim**-0.5

    untouched = slab[[0, 3, 4, 5, 6]].clone()
    found = advance_delta_rule(query, key, value, decay, beta, slab, before, after, True)
    close(found, expected.to(dtype), dtype)
    close(slab[after], state.float(), torch.float32)
    assert torch.equal(slab[[0, 3, 4, 5, 6]], untouched)
    none = [x[:0] for x in (query, key, value, decay, beta)]
    assert advance_delta_rule(*none, slab, before[:0], after[:0], True).shape == (0, 1, heads, width)
