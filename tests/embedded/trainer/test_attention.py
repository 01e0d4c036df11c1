"""Packed attention equals dense attention over each sample by itself, for every kernel it may choose."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from miles_core.contracts.trainer import Context
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_embedded.model import attention
from miles_embedded.model.attention import AttentionOptions, ShortAttention
from miles_embedded.trainer.attention import PackedCall
from miles_embedded.trainer.packing import pack


def packed(lengths=((5, (7, 3, 1)), (9, (2, 30)), (40, (1,)), (3, (20, 18, 19, 60)))):
    generator = torch.Generator().manual_seed(0)
    samples = []
    for group, (prompt, responses) in enumerate(lengths):
        head = torch.randint(0, 50, (prompt,), generator=generator).tolist()
        for n in responses:
            tail = torch.randint(0, 50, (n,), generator=generator).tolist()
            samples.append(Sample(tokens=head + tail, response_length=n, group_index=group, index=len(samples)))
    batch = collate(samples)
    return batch, pack(batch)


def dense(batch, packing, query, key, value, scaling, window=0, sinks=None):
    """The same, one sample at a time, over its rows; sinks are one more column of scores, dropped after the softmax."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    out = torch.zeros(query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype)
    for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        rows = packing.row_of[start : start + length]
        rows = rows[rows >= 0]
        q, k, v = (x[0][:, rows] for x in (query, key, value))
        at = torch.arange(len(rows))
        seen = (at <= at[:, None]) & (at > at[:, None] - (window or len(rows)))
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(rows), 1)], -1)
        out = out.index_copy(0, rows, (scores.softmax(-1)[..., : len(rows)] @ v).transpose(0, 1))
    return out[None]


@pytest.mark.parametrize("short", [0, 64, 10_000])
@pytest.mark.parametrize(("heads", "kv", "dim", "width"), [(4, 2, 8, 8), (4, 4, 12, 8), (2, 1, 6, 10)])
@pytest.mark.parametrize(("window", "with_sinks"), [(0, False), (0, True), (4, False), (12, True), (10_000, False)])
def test_equal_to_dense_attention(monkeypatch, heads, kv, dim, width, short, window, with_sinks):
    monkeypatch.setattr(attention, "_SHORT", short)
    batch, packing = packed()
    call = PackedCall(Context("train", (0,), packing.rows), packing)
    generator = torch.Generator().manual_seed(1)
    rows = len(packing.rows)
    inputs = [
        torch.randn(1, rows, h, d, generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for h, d in ((heads, dim), (kv, dim), (kv, width))
    ]
    sinks = None
    if with_sinks:
        sinks = torch.randn(heads, generator=generator, dtype=torch.float64).requires_grad_()
    ours = call.attend(nn.Identity(), *inputs, 0.3, AttentionOptions(window, sinks) if window or with_sinks else None)
    theirs = dense(batch, packing, *inputs, 0.3, window, sinks)
    inputs += [sinks] * with_sinks
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weight = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((theirs * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_padding_is_bounded():
    _, packing = packed([(100, tuple(range(10, 400, 7))), (3, tuple(range(1, 50)))])
    call = PackedCall(Context("train", (0,), packing.rows), packing).buckets
    assert len(call.pads) < 0.35 * len(packing.rows)


def test_bfloat16_softmax_is_taken_in_float32():
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, 60, 16, generator=generator).bfloat16() for _ in range(3))
    found = ShortAttention.apply(q, k, v, None, 0.25)
    expected = nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, scale=0.25)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("heads", "kv", "dim", "width"), [(8, 2, 64, 64), (4, 4, 192, 128), (2, 1, 12, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_attends_alike(dtype, heads, kv, dim, width):
    batch, packing = packed(((5, (7, 3, 1)), (90, (2, 130)), (40, (1,)), (3, (20, 300, 19, 60))))
    generator = torch.Generator().manual_seed(1)
    rows = len(packing.rows)
    exact = [
        torch.randn(1, rows, h, d, generator=generator, dtype=torch.float64)
        .to(dtype)
        .double()
        .transpose(1, 2)
        .requires_grad_()
        for h, d in ((heads, dim), (kv, dim), (kv, width))
    ]
    there = [x.detach().to("cuda", dtype).requires_grad_() for x in exact]
    moved = replace(packing, rows=packing.rows.cuda())
    ours = PackedCall(Context("train", (0,), moved.rows), moved).attend(nn.Identity(), *there, 0.3)
    theirs = dense(batch, packing, *exact, 0.3)
    weight = torch.randn(theirs.shape, generator=generator, dtype=torch.float64)
    found = [ours, *torch.autograd.grad((ours * weight.to("cuda", dtype)).sum(), there)]
    expected = [theirs, *torch.autograd.grad((theirs * weight).sum(), exact)]
    for a, b in zip(found, expected, strict=True):
        assert (a.cpu().double() - b).norm() < (1e-4 if dtype == torch.float32 else 2e-2) * b.norm()


def test_the_gradient_is_not_copied_into_zeros():
    _, packing = packed()
    call = PackedCall(Context("train", (0,), packing.rows), packing)
    inputs = [torch.randn(1, len(packing.rows), 2, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    out = call.attend(nn.Identity(), *inputs, 0.3).sum()
    with torch.profiler.profile() as profiler:
        out.backward()
    assert "aten::select_backward" not in {event.name for event in profiler.events()}
