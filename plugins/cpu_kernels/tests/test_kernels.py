"""The compiled steps equal plain float64 code, whatever the sizes; sizes around those of vectors, which have 4, 8 or 16 numbers."""

import pytest
import torch

from miles_cpu_kernels import kernels
from miles_cpu_kernels.kernels import Cached, Tree

pytestmark = pytest.mark.usefixtures("kernels")

NAN, INF = float("nan"), float("inf")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- norm


def norm(x, weight, eps=1e-5):
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (7, 16), (2, 3, 17), (90, 33), (700, 41)])
def test_rms_norm(compare, shape):
    inputs = [randn(*shape), randn(shape[-1], seed=1)]
    compare(lambda x, w: kernels.rms_norm(x, w, 1e-5), norm, inputs)


def test_rms_norm_of_a_view(compare):
    compare(
        lambda x, w: kernels.rms_norm(x.transpose(0, 1), w, 0.1),
        lambda x, w: norm(x.transpose(0, 1), w, 0.1),
        [randn(3, 5, 18), randn(18, seed=1)],
    )


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("column", [0, 34])
def test_rms_norm_of_what_is_not_finite(value, column):
    x, weight = randn(4, 35), randn(35, seed=1)
    x[2, column] = value
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), norm(x, weight), equal_nan=True)


# ---- rotation


def rotated(x, cosine, sine):
    a, b = x.chunk(2, -1)
    return x * cosine + torch.cat([-b, a], -1) * sine


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 2), (3, 2, 6), (5, 3, 32), (9, 2, 40), (130, 4, 34)])
def test_rotate(compare, rows, heads, dim):
    # Halves of the angles differ, as no model's do, so that each is seen to be used where it belongs.
    cosine, sine = randn(1, rows, dim, seed=1), randn(1, rows, dim, seed=2)
    compare(
        lambda x: kernels.rotate(x.transpose(1, 2), cosine, sine),
        lambda x: rotated(x.transpose(1, 2), cosine.double(), sine.double()),
        [randn(1, rows, heads, dim)],
    )


def test_rotate_of_what_is_not_finite():
    x, cosine, sine = randn(1, 2, 3, 20), randn(1, 3, 20, seed=1), randn(1, 3, 20, seed=2)
    x[0, 0, 0, 9], x[0, 1, 1, 10], x[0, 1, 2, 0] = NAN, INF, -INF
    torch.testing.assert_close(kernels.rotate(x, cosine, sine), rotated(x, cosine, sine), equal_nan=True)


# ---- routing


@pytest.mark.parametrize(("rows", "k", "experts"), [(0, 2, 3), (1, 1, 1), (50, 3, 7), (9, 2, 40)])
def test_choices_are_sorted_stably(rows, k, experts):
    index = torch.randint(0, experts, (rows, k), generator=torch.Generator().manual_seed(0))
    found, order = kernels.sort_choices(index, experts), index.reshape(-1).argsort(stable=True)
    assert torch.equal(found.order, order)
    assert torch.equal(found.place, order.argsort().view(rows, k))
    assert torch.equal(found.row, order // k)
    assert torch.equal(found.counts, torch.bincount(index.reshape(-1), minlength=experts))
    assert torch.equal(found.ends, found.counts.cumsum(0).int()) and found.ends.dtype == torch.int32


@pytest.mark.parametrize("bad", [-1, 4, 1 << 40])
def test_sorting_refuses_an_expert_that_there_is_not(bad):
    with pytest.raises(IndexError, match="not in the range 0 to 3"):
        kernels.sort_choices(torch.tensor([[0, 3], [1, bad]]), 4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "k", "dim"), [(1, 1, 1), (5, 2, 16), (6, 3, 35), (200, 4, 33)])
def test_gather_sum(with_threads, near, rows, k, dim, weighted):
    x, weight = randn(rows * k, dim), randn(rows, k, seed=1) if weighted else None
    place = torch.randperm(rows * k, generator=torch.Generator().manual_seed(2)).view(rows, k)
    (found,) = with_threads(lambda: [kernels.gather_sum(x, place, weight)])
    picked = x.double()[place]
    near(found, (picked if weight is None else picked * weight.double().unsqueeze(2)).sum(1))


# ---- log-probabilities


def log_softmax(logits, tokens):
    return logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


def tokens_of(rows, vocabulary):
    return torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (3, 7), (9, 64), (4, 1001), (300, 67)])
def test_log_probs(compare, rows, vocabulary):
    tokens = tokens_of(rows, vocabulary)
    compare(lambda x: kernels.log_probs(x, tokens), lambda x: log_softmax(x, tokens), [3 * randn(rows, vocabulary)])


def test_log_probs_of_logits_far_apart(compare):
    logits = 1e4 * torch.randint(-1, 2, (12, 37), generator=torch.Generator().manual_seed(4)).float()
    tokens = tokens_of(12, 37)
    compare(lambda x: kernels.log_probs(x, tokens), lambda x: log_softmax(x, tokens), [logits])


def test_log_probs_of_what_is_not_finite():
    logits, tokens = randn(9, 37), torch.full((9,), 5)
    for row, (column, value) in enumerate((c, v) for c in (0, 36) for v in (NAN, INF, -INF)):
        logits[row, column] = value
    logits[6, 5] = -INF
    logits[7], logits[8] = -INF, NAN
    results = []
    for function in (kernels.log_probs, log_softmax):
        x = logits.clone().requires_grad_()
        out = function(x, tokens)
        results.append((out.detach(), *torch.autograd.grad(out, x, torch.ones(9))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("bad", [-1, 8])
def test_log_probs_refuses_a_token_that_there_is_not(bad):
    with pytest.raises(IndexError, match="not in the range 0 to 7"):
        kernels.log_probs(torch.zeros(2, 8), torch.tensor([0, bad]))


def test_the_exponential_is_right_to_the_last_places():
    """Beside a logit of 0, one so low that it does not change the sum has its exponential as probability, and that as gradient."""
    low = torch.linspace(-87.3, -17.4, 20_001)
    logits = torch.stack([torch.zeros_like(low), low], 1).requires_grad_()
    out = kernels.log_probs(logits, torch.zeros(len(low), dtype=torch.int64))
    (grad,) = torch.autograd.grad(out.sum(), logits)
    exact = low.double().exp()
    assert ((-grad[:, 1].double() - exact).abs() / exact).max() < 1.5 * 2.0**-23
    tiny = kernels.log_probs(torch.tensor([[0.0, -87.4, -200.0, -INF]]), torch.tensor([0]))
    assert tiny.item() == 0


def test_a_row_does_not_depend_on_the_others(same_bits):
    some = torch.tensor([170, 3, 44, 3])
    x, weight, tokens = randn(400, 53), randn(53, seed=1), tokens_of(400, 53)
    assert same_bits(kernels.rms_norm(x, weight, 1e-5)[some], kernels.rms_norm(x[some], weight, 1e-5))
    assert same_bits(kernels.log_probs(x, tokens)[some], kernels.log_probs(x[some], tokens[some]))


# ---- attention of packed segments


def tree_of(families):
    """[(trunk length, [branch lengths])], rows in that order."""
    segments, starts, row = [], [], 0
    for trunk, branches in families:
        first = row
        starts.append(len(segments))
        segments.append((0, 0, first, trunk))
        row += trunk
        for branch in branches:
            segments.append((first, trunk, row, branch))
            row += branch
    return torch.tensor(segments), torch.tensor([*starts, len(segments)]), row


def attended(q, keys, values, scaling):
    """One row: q [heads, dim], keys and values [n, kv heads, ..] that it sees -> [heads, value dim]."""
    keys, values = (x.repeat_interleave(len(q) // x.shape[1], 1) for x in (keys, values))
    weights = (torch.einsum("hd,nhd->hn", q, keys) * scaling).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, values)


def dense(q, k, v, segments, scaling):
    """Row by row, so that not even a weight of zero meets what a row does not see."""
    out = []
    for trunk, seen, own, length in segments.tolist():
        for row in range(own, own + length):
            keys, values = (torch.cat([x[trunk : trunk + seen], x[own : row + 1]]) for x in (k, v))
            out.append(attended(q[row], keys, values, scaling))
    return torch.stack(out)


TREES = {
    "one row": [(1, ())],
    "trunks": [(3, ()), (1, ()), (20, ())],
    "branches": [(5, (7, 3, 1)), (9, ()), (1, (1, 1)), (33, (2, 16, 1)), (15, (17,))],
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (4, 2, 8, 8), (4, 4, 12, 8), (2, 1, 6, 10), (6, 2, 17, 35)])
def test_tree_attention(compare, tree, sizes):
    heads, kv, dim, width = sizes
    segments, families, rows = tree_of(TREES[tree])
    compare(
        lambda *x: kernels.tree_attention(*x, Tree(segments, families), 0.3),
        lambda *x: dense(*x, segments, 0.3),
        [randn(rows, heads, dim), randn(rows, kv, dim, seed=1), randn(rows, kv, width, seed=2)],
        4e-6,
    )


def test_tree_attention_of_scores_far_apart(compare):
    """Small whole numbers, so that scores of thousands are exact in float32 too."""
    segments, families, rows = tree_of(TREES["branches"])
    q, k = (30 * randn(rows, 2, 8, seed=i) for i in range(2))
    compare(
        lambda *x: kernels.tree_attention(*x, Tree(segments, families), 0.5),
        lambda *x: dense(*x, segments, 0.5),
        [q.round(), k.round(), randn(rows, 2, 8, seed=2)],
        1e-5,
    )


def test_the_only_key_keeps_its_weight_in_the_gradient():
    """A softmax over one score is 1 whatever the score, so nothing goes back through it."""
    segments, families, rows = tree_of([(1, ())] * 40)
    q, k = (40 * randn(rows, 2, 8, seed=i) for i in range(2))
    leaves = [q.requires_grad_(), k.requires_grad_()]
    out = kernels.tree_attention(*leaves, randn(rows, 2, 8, seed=2), Tree(segments, families), 0.3)
    assert not any(g.any() for g in torch.autograd.grad(out, leaves, randn(*out.shape, seed=3)))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_reaches_the_rows_that_see_it(which, value):
    segments, families, rows = tree_of(TREES["branches"])
    inputs = [randn(rows, 2, 6, seed=i) for i in range(3)]
    inputs[which][[3, 8, 30, rows - 1], 1, 5] = value
    results = []
    for function in (
        lambda *x: kernels.tree_attention(*x, Tree(segments, families), 0.4),
        lambda *x: dense(*x, segments, 0.4),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        # A gradient of zero times infinity is NaN in one order of products and 0 in another; NaN must stay NaN.
        grads = torch.autograd.grad(out, leaves, randn(*out.shape, seed=5)) if value != value else ()
        results.append((out.detach(), *grads))
    assert not results[1][0].isfinite().all()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


# ---- attention over the cache


def cache_of(rows, kv, dim, width, seed=0):
    """Rows that feed some tokens each, in shuffled slots, with shared prompts; NaN wherever nothing is held."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low, high, count):
        return torch.randint(low, high, (count,), generator=generator)

    slots = rows + 3
    lengths, counts, before = whole(1, 40, 4), whole(1, 5, rows), whole(0, 20, rows)
    before[0] = 0
    prompt_of, slot = whole(0, 4, rows), torch.randperm(slots, generator=generator)[:rows]
    prompts, own = (
        tuple(torch.full((n, kv, capacity, d), NAN) for d in (dim, width)) for n, capacity in ((4, 48), (slots, 24))
    )
    for slabs, where, held in ((prompts, range(4), lengths), (own, slot.tolist(), before)):
        for slab in slabs:
            for i, n in zip(where, held.tolist(), strict=True):
                slab[i, :, :n] = torch.randn(kv, n, slab.shape[3], generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return prompts, own, (offsets, prompt_of, lengths[prompt_of], slot, before)


def over_cache(q, k, v, prompts, own, where, scaling):
    """Token by token: appends, then attends; the slabs [slots, kv heads, capacity, ..] change."""
    out = []
    for row, (prompt, length, slot, held) in enumerate(zip(*(x.tolist() for x in where[1:]), strict=True)):
        for token in range(where[0][row], where[0][row + 1]):
            for slab, fed in zip(own, (k, v), strict=True):
                slab[slot, :, held] = fed[token]
            held += 1
            keys, values = (
                torch.cat([far[prompt, :, :length], near[slot, :, :held]], 1).transpose(0, 1)
                for far, near in zip(prompts, own, strict=True)
            )
            out.append(attended(q[token], keys, values, scaling))
    return torch.stack(out)


@pytest.mark.parametrize(
    ("rows", "heads", "kv", "dim", "width"),
    [(1, 1, 1, 1, 1), (5, 4, 2, 8, 8), (6, 3, 3, 12, 7), (4, 6, 2, 35, 18), (130, 4, 2, 33, 16)],
)
def test_cached_attention(with_threads, near, same_bits, rows, heads, kv, dim, width):
    prompts, own, where = cache_of(rows, kv, dim, width)
    tokens = int(where[0][-1])
    q, k, v = randn(tokens, heads, dim), randn(tokens, kv, dim, seed=1), randn(tokens, kv, width, seed=2)

    def ours():
        slabs = tuple(x.clone() for x in own)
        return kernels.cached_attention(q, k, v, prompts, slabs, Cached(*where), 0.3), *slabs

    found, *appended = with_threads(ours)
    exact = [tuple(x.double() for x in group) for group in ((q, k, v), prompts, own)]
    near(found, over_cache(*exact[0], exact[1], exact[2], where, 0.3))
    for slab, expected in zip(appended, exact[2], strict=True):
        assert same_bits(slab, expected.float())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_cached_attention_of_what_is_not_finite(which):
    prompts, own, where = cache_of(6, 2, 10, 10)
    fed = [randn(int(where[0][-1]), 2, 10, seed=i) for i in range(3)]
    fed[which][4, 1, 9], fed[which][7, 0, 0] = NAN, INF
    copies = tuple(x.clone() for x in own)
    found = kernels.cached_attention(*fed, prompts, own, Cached(*where), 0.3)
    expected = over_cache(*fed, prompts, copies, where, 0.3)
    assert not expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
