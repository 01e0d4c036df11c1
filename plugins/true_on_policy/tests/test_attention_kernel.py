"""The attention kernel of a GPU, in Triton's interpreter where it is installed: against torch in float64, and its independence of the batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_calls import MODULE, OPTIONS, heads, packed

from miles_core.contracts.trainer import Context
from miles_core.plugin import ConfigError
from miles_embedded import DecodeCall, PromptCall, StaticCall, StaticPromptCall
from miles_embedded.engine.cache import Cache, CachedRows
from miles_embedded.engine.static_batch import StaticBatch

HERE = "cuda" if torch.cuda.is_available() else "cpu"
#: The interpreter's bfloat16 products are wrong.
DTYPES = [torch.float32, torch.bfloat16 if HERE == "cuda" else torch.float16]


@pytest.fixture
def attend(triton):
    from miles_true_on_policy.tiles import attend_by_tiles

    return attend_by_tiles


def on(device, options):
    return options and replace(options, sinks=None if options.sinks is None else options.sinks.to(device))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_trunks_and_branches(attend, name, dtype):
    trunk, lengths = 70, [9, 1, 64]
    qkv = [x.to(HERE) for x in heads(trunk + sum(lengths), torch.Generator().manual_seed(2), dtype)]
    options, call = on(HERE, OPTIONS[name]), packed(lengths, trunk)
    found = attend(call, MODULE, *qkv, 0.25, options)
    wide = options and replace(options, sinks=None if options.sinks is None else options.sinks.double().cpu())
    expected = call.attend(MODULE, *(x.double().cpu() for x in qkv), 0.25, wide)
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 5e-3)
    start = trunk
    for length in lengths:
        rows = torch.cat([torch.arange(trunk), torch.arange(start, start + length)])
        alone = PromptCall(Context("rollout", (0,), rows), [len(rows)])
        assert torch.equal(found[:, rows], attend(alone, MODULE, *(x[:, :, rows] for x in qkv), 0.25, options))
        start += length


@pytest.mark.parametrize(("dim", "value_dim"), [(16, 16), (20, 12), (72, 40)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_of_heads_are_tried(triton, monkeypatch, dim, value_dim, dtype):
    from miles_true_on_policy import tiles

    check, device = tiles.check_attention.__wrapped__, torch.device(HERE)
    check(6, 2, dim, value_dim, dtype, device)
    wrong = tiles.attend_tiles
    monkeypatch.setattr(
        tiles, "attend_tiles", lambda q, keys, values, records, *rest: wrong(q, values, values, records, *rest)
    )
    if dim == value_dim:
        with pytest.raises(ConfigError, match=f"6 heads of {dim} entries"):
            check(6, 2, dim, value_dim, dtype, device)


@pytest.mark.parametrize("name", ["plain", "window", "sinks"])
@pytest.mark.parametrize("static", [False, True], ids=["decode", "static"])
def test_a_decoded_token_has_the_bits_of_its_prompt(attend, name, static):
    """Two rows, with prompts of 37 and 5 tokens, decode three tokens of their sequences."""
    options, device = on(HERE, OPTIONS[name]), torch.device(HERE)
    lengths, prompts = [40, 12], [37, 5]
    generator = torch.Generator().manual_seed(5)
    sequences = [[x.to(HERE) for x in heads(n, generator)] for n in lengths]
    whole = []
    for n, qkv in zip(lengths, sequences, strict=True):
        call = PromptCall(Context("train", (0,), torch.arange(n, device=device)), [n])
        whole.append(attend(call, MODULE, *qkv, 0.25, options)[0])
    cache = Cache()
    slots = cache.add_prefixes(prompts)
    call = PromptCall(Context("rollout", (0,), torch.arange(sum(prompts), device=device)), prompts, cache, slots)
    front = [torch.cat([s[i][:, :, :n] for s, n in zip(sequences, prompts, strict=True)], 2) for i in range(3)]
    attend(call, MODULE, *front, 0.25, options)
    rows = cache.add_rows(slots.tolist())
    batch = StaticBatch(2, device)
    for step in range(3):
        fed = [
            torch.cat([s[i][:, :, n + step, None] for s, n in zip(sequences, prompts, strict=True)], 2)
            for i in range(3)
        ]
        context = Context("rollout", (0,), torch.arange(2, device=device))
        if static:
            cache.own.reserve(2, 16)
            batch.fill([0, 0], np.full(2, step), slots, np.array(prompts), [0, 1], [1.0, 1.0], [0, 0])
            found = attend(StaticCall(context, cache, batch, 2), MODULE, *fed, 0.25, options)
        else:
            held = CachedRows(cache, rows, np.ones(2, np.int64), device)
            found = attend(DecodeCall(context, held), MODULE, *fed, 0.25, options)
        cache.own.lengths[rows] += 1
        for row, (n, expected) in enumerate(zip(prompts, whole, strict=True)):
            assert torch.equal(found[0, row], expected[n + step])


@pytest.mark.parametrize("lengths", [[37, 5, 20], [1], [16] * 4])
@pytest.mark.parametrize("name", ["plain", "window", "sinks"])
def test_prompts_in_static_buffers_have_the_bits_of_plain_ones(attend, lengths, name):
    from miles_embedded.engine.static_prompts import PromptBatch, PromptShape

    options, device, count = on(HERE, OPTIONS[name]), torch.device(HERE), sum(lengths)
    shape, batch, caches = PromptShape.of(lengths, set()), PromptBatch(device), (Cache(), Cache())
    qkv = [x.to(HERE) for x in heads(shape.tokens, torch.Generator().manual_seed(5))]
    slots = [cache.add_prefixes(lengths) for cache in caches]
    rows = torch.arange(shape.tokens, device=device)
    plain = PromptCall(Context("rollout", (0,), rows[:count]), lengths, caches[0], slots[0])
    expected = attend(plain, MODULE, *(x[:, :, :count] for x in qkv), 0.25, options)
    prefixes = caches[1].prefixes
    prefixes.reserve(prefixes.size + 1, 1)
    batch.fill([[2] * n for n in lengths], slots[1], prefixes.size, shape, [0] * len(lengths))
    static = StaticPromptCall(Context("rollout", (0,), rows), caches[1], batch, shape)
    assert torch.equal(attend(static, MODULE, *qkv, 0.25, options)[:, :count], expected)
    for kind in "kv":
        stored = [cache.prefixes.slabs[kind, 0] for cache in caches]
        for n, one, two in zip(lengths, *slots, strict=True):
            assert torch.equal(stored[0][one, :, :n], stored[1][two, :, :n])


def test_products_of_groups(triton):
    from miles_true_on_policy import kernels

    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(HERE) for shape in ((200, 96), (5, 80, 96)))
    ends = torch.tensor([3, 3, 140, 141, 200], dtype=torch.int32, device=HERE)
    found = kernels.grouped_product(x, weight.transpose(1, 2), ends)
    start = 0
    for end, matrix in zip(ends.tolist(), weight, strict=True):
        torch.testing.assert_close(found[start:end], x[start:end] @ matrix.t(), rtol=1e-4, atol=1e-4)
        if end > start:
            assert torch.equal(found[start:end], kernels.product(x[start:end][None], matrix.t()[None])[0])
        start = end


@pytest.mark.parametrize("width", [3, 259, 5000])
def test_log_softmax(triton, width):
    from miles_true_on_policy.normalize import log_softmax

    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(HERE).requires_grad_()
    x.data[1, :2] = -torch.inf
    found, expected = log_softmax(x), x.double().log_softmax(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(4, width, generator=torch.Generator().manual_seed(1)).to(HERE)
    weights[1, :2] = 0
    one, two = (torch.autograd.grad((y[:, 2:] * weights[:, 2:]).sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(one, two.float(), rtol=1e-4, atol=1e-5)
