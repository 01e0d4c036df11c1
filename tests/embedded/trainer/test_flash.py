"""Flash attention over prompts and responses, with a double of torch's operators: in two calls, and with copies of the prompts' keys."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_embedded.trainer import flash as module
from miles_embedded.trainer.packing import pack


def packed(groups):
    """Groups of samples: length of the prompt, and of each response."""
    samples = []
    for group, (prompt, responses) in enumerate(groups):
        for n in responses:
            tokens = [group] * prompt + [100 + len(samples)] * n
            samples.append(Sample(tokens=tokens, response_length=n, group_index=group, index=len(samples)))
    return pack(collate(samples))


def attend(q, k, v, sequences, scaling):
    """Each sequence by itself, with autograd; log-sum-exps [heads, queries]."""
    outs, sums = [], []
    for (a, c), (b, d) in pairwise(zip(sequences.queries.tolist(), sequences.keys.tolist(), strict=True)):
        x, y, z = q[a:b], k[c:d], v[c:d]
        assert b - a <= sequences.longest_query and d - c <= sequences.longest_key
        y, z = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (y, z))
        scores = torch.einsum("qhd,khd->hqk", x, y) * scaling
        if sequences.causal:  # the last query is at the last key
            scores = scores.masked_fill(torch.ones(b - a, d - c).triu(d - c - b + a + 1).bool(), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), z))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


def differentiate(grad, q, k, v, out, lse, sequences, seeds, scaling):
    """Gradients from the probabilities exp(score - lse), as the kernel computes them."""
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    share = q.shape[1] // k.shape[1]
    for (a, c), (b, d) in pairwise(zip(sequences.queries.tolist(), sequences.keys.tolist(), strict=True)):
        y, z = (t[c:d].repeat_interleave(share, 1) for t in (k, v))
        p = (torch.einsum("qhd,khd->hqk", q[a:b], y) * scaling - lse[:, a:b, None]).exp()
        if sequences.causal:
            p = p.tril(d - c - b + a)
        of_p = torch.einsum("qhd,khd->hqk", grad[a:b], z) - (grad[a:b] * out[a:b]).sum(-1).t()[..., None]
        of_s = p * of_p * scaling
        grads[0][a:b] += torch.einsum("hqk,khd->qhd", of_s, y)
        for target, left, right in ((grads[1], of_s, q[a:b]), (grads[2], p, grad[a:b])):
            target[c:d] += torch.einsum("hqk,qhd->khd", left, right).unflatten(1, (-1, share)).sum(2)
    return grads


@pytest.fixture
def double(monkeypatch, triton):
    monkeypatch.setattr(module, "_forward", lambda *args: (*attend(*args), torch.zeros(2), torch.zeros(())))
    monkeypatch.setattr(module, "_backward", differentiate)
    monkeypatch.setattr(module, "kernels_run", lambda device: True)


GROUPS = [
    [(5, (7, 3, 1)), (9, (2, 30)), (40, (1,)), (3, (20, 18))],
    [(4, (6,)), (8, (3,))],  # nothing is shared
    [(3, (2, 2, 2))],
]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("most", [0.0, 1e9], ids=["two calls", "copies"])
def test_both_ways_equal_autograd(groups, most, double, monkeypatch):
    packing = packed(groups)
    generator, rows = torch.Generator().manual_seed(0), len(packing.rows)
    q, k, v = (torch.randn(rows, n, 16, generator=generator).requires_grad_() for n in (4, 2, 2))
    weight = torch.randn(rows, 4, 16, generator=generator)

    reference = module.FlashPlan(packing)
    keys = reference.copies.rows
    expected, _ = attend(q, k[keys], v[keys], reference.copies.attended, 0.25)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    monkeypatch.setattr(module, "_KEYS", most)
    monkeypatch.setattr(module, "_ELEMENTS", most)
    plan = module.FlashPlan(packing)
    found = module.flash(q, k, v, plan, 0.25)
    given = torch.autograd.grad((found * weight).sum(), (q, k, v))
    for a, b in zip((found, *given), (expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert ("copies" in vars(plan)) is (most > 0 and plan.across is not None)


def test_the_keys_of_a_branch_are_those_of_its_trunk_and_its_own():
    packing = packed([(3, (2, 4)), (2, (3,))])
    copies = module.FlashPlan(packing).copies
    trunks, branches = packing.trunks, packing.branches
    assert copies.attended.queries.diff().tolist() == [3, 1, 3, 4]  # the last token of a sample is not computed
    first, second, third, fourth = (copies.rows[a:b].tolist() for a, b in pairwise(copies.attended.keys.tolist()))
    shared = list(range(trunks.start[0], trunks.start[0] + 3))
    assert first == shared and fourth == list(range(trunks.start[1], trunks.start[1] + 4))
    for keys, start, length in zip((second, third), branches.start, branches.length, strict=True):
        assert keys == [*shared, *range(start, start + length)]
    for row, (start, end) in enumerate(pairwise(copies.ends.tolist())):
        assert copies.places[start:end].tolist() == (copies.rows == row).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("group", "heads", "kv_heads", "copied"),
    [
        ((16, (128, 128)), 8, 2, True),
        ((4000, (8, 8)), 8, 1, False),  # many times as many keys as queries
        ((200, (128, 128)), 8, 2, True),
        ((200, (128, 128)), 8, 8, False),  # as many heads of keys as of queries: their copies would take more memory
        ((4, (6,)), 8, 2, False),  # nothing is shared
    ],
)
def test_keys_are_copied_where_that_is_cheap(group, heads, kv_heads, copied, double):
    q, k = torch.zeros(1, heads, 16), torch.zeros(1, kv_heads, 16)
    assert (module.FlashPlan(packed([group])).find_copies(q, k, 0.25) is not None) is copied


@pytest.mark.parametrize("longest", [100, 1000])
def test_cudnn_gets_long_responses_without_copies(longest, double, monkeypatch):
    monkeypatch.setattr(module, "_LONGEST", longest)
    q, k, plan = torch.zeros(1, 8, 16), torch.zeros(1, 2, 16), module.FlashPlan(packed([(16, (128, 128))]))
    assert plan.find_copies(q, k, 0.25) is not None
    monkeypatch.setattr(module, "cudnn_supports", lambda *_: True)
    assert (plan.find_copies(q, k, 0.25) is None) is (longest == 100)
