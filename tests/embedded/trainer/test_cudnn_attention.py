"""Attention through cuDNN, on a double of its package that computes on the CPU what a graph declares. The kernels were compared with
FlashAttention-2 and float64 on an H200."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from miles_embedded.model.flash import Sequences
from miles_embedded.trainer import cudnn_attention as module
from miles_embedded.trainer import flash


class Tensor:
    """A declared tensor; setters return it."""

    def __init__(self, **declared):
        self.__dict__.update(declared)

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda value: setattr(self, name.removeprefix("set_"), value) or self


class Graph:
    """Computes the declared attention for each sequence, from the offsets and lengths that it is given."""

    def __init__(self, **types):
        self.refused = False

    def tensor(self, **declared):
        return Tensor(**declared)

    def sdpa(self, **given):
        return self._declare(given, 2)

    def sdpa_backward(self, **given):
        return self._declare(given, 3)

    def _declare(self, given, results):
        self.given, self.results = given, [Tensor() for _ in range(results)]
        return self.results

    def build_plans(self):
        if cudnn.refuses:
            raise RuntimeError("no engine")

    def validate(self, *_):
        """Every other step of building a graph."""

    build_operation_graph = create_execution_plans = check_support = validate

    def get_workspace_size(self):
        return 8

    def execute(self, tensors, workspace, handle):
        cudnn.executed.append(len(self.results))
        data = {name: tensors[x.uid] for name, x in self.given.items() if isinstance(x, Tensor)}
        lengths = zip(data["seq_len_q"].tolist(), data["seq_len_kv"].tolist(), strict=True)
        for number, (n, m) in enumerate(lengths):

            def rows(declared, count, number=number):
                start = int(tensors[declared.ragged_offset.uid][number])
                width = declared.dim[1] * declared.dim[3]
                flat = tensors[declared.uid].reshape(-1)[start : start + count * width]
                return flat.view(count, declared.dim[1], declared.dim[3])

            inputs = [rows(self.given[name], count) for name, count in (("q", n), ("k", m), ("v", m))]
            out, sums = attend(*inputs, self.given["attn_scale"], is_causal(self.given, n, m))
            found = [out, sums.t().unsqueeze(-1)]
            if len(self.results) == 3:
                p = scores(*inputs[:2], self.given["attn_scale"], is_causal(self.given, n, m)).sub(
                    rows(self.given["stats"], n).double()[..., 0].t().unsqueeze(-1)
                )
                found = differentiate(p.exp(), *inputs, rows(self.given["o"], n), rows(self.given["dO"], n), self.given)
            for declared, value, count in zip(
                self.results, found, (n, *[m if len(found) == 3 else n] * 2), strict=False
            ):
                rows(declared, count).copy_(value)


cudnn = SimpleNamespace(
    pygraph=Graph,
    data_type=SimpleNamespace(FLOAT="float", INT32="int32", BFLOAT16="bfloat16", HALF="half"),
    heur_mode=SimpleNamespace(A="A"),
    diagonal_alignment=SimpleNamespace(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right"),
    cudnnGraphNotSupportedError=KeyError,
    create_handle=lambda: "handle",
    set_stream=lambda handle, stream: None,
    executed=[],
    refuses=False,
)


def is_causal(given, queries, keys):
    """Whether a query attends to the keys up to its own, the last query being at the last key."""
    assert ("diagonal_alignment" in given) is ("diagonal_band_right_bound" in given)
    if "diagonal_alignment" not in given:
        return False
    assert given["diagonal_band_right_bound"] == 0
    assert given["diagonal_alignment"] == "bottom right" or queries == keys
    return True


def scores(q, k, scaling, causal):
    found = (
        torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)) * scaling
    )
    return (
        found.masked_fill(torch.ones(found.shape[1:]).triu(1 + len(k) - len(q)).bool(), -torch.inf) if causal else found
    )


def attend(q, k, v, scaling, causal):
    s = scores(q, k, scaling, causal)
    out = torch.einsum("hqk,khd->qhd", s.softmax(-1), v.double().repeat_interleave(q.shape[1] // v.shape[1], 1))
    return out, s.logsumexp(-1)


def differentiate(p, q, k, v, out, grad, given):
    """Gradients from probabilities [heads, queries, keys], as FlashAttention computes them."""
    share, heads = q.shape[1] // k.shape[1], k.shape[1]
    grad, wide = grad.double(), [x.double().repeat_interleave(share, 1) for x in (k, v)]
    of_p = torch.einsum("qhd,khd->hqk", grad, wide[1]) - (grad * out.double()).sum(-1).t().unsqueeze(-1)
    of_s = p * of_p * given["attn_scale"]
    sums = [torch.einsum("hqk,qhd->khd", a, b) for a, b in ((of_s, q.double()), (p, grad))]
    return [
        torch.einsum("hqk,khd->qhd", of_s, wide[0]),
        *(x.unflatten(1, (heads, share)).sum(2) for x in sums),
    ]


@pytest.fixture
def double(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(module, "_handle", lambda device: "handle")
    monkeypatch.setattr(module, "_stream", lambda device: 0)
    monkeypatch.setattr(module, "cudnn_runs", lambda device: True)
    monkeypatch.setattr(module, "_LEAST_WORK", 1)
    monkeypatch.setattr(cudnn, "refuses", False)
    module._graph.cache_clear()
    cudnn.executed.clear()
    yield cudnn
    module._graph.cache_clear()


def draw(queries, keys, causal=True, heads=4, kv_heads=2, width=16):
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(queries), heads), (sum(keys), kv_heads), (sum(keys), kv_heads), (sum(queries), heads)
    tensors = [torch.randn(*shape, width, generator=generator).bfloat16() for shape in shapes]
    ends = [torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32) for x in (queries, keys)]
    if queries == keys:
        ends[1] = ends[0]
    return *tensors, Sequences(*ends, max(queries), max(keys), causal)


@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [([5, 1, 70], [5, 1, 70], True), ([3, 130], [64, 2], False), ([5, 1, 70], [9, 1, 100], True)],
)
def test_attention_and_gradients_of_packed_sequences(queries, keys, causal, double):
    q, k, v, grad, sequences = draw(queries, keys, causal)
    out, lse = module.cudnn_forward(q, k, v, sequences, 0.25)
    found = module.cudnn_gradients(grad, q, k, v, out, lse, sequences, 0.25)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    parts = [x.split(n) for x, n in zip(leaves, (queries, keys, keys), strict=True)]
    expected = [attend(*part, 0.25, sequences.causal) for part in zip(*parts, strict=True)]
    whole = torch.cat([one[0] for one in expected])
    torch.testing.assert_close(out.double(), whole.detach(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), torch.cat([one[1] for one in expected], 1).detach(), atol=1e-4, rtol=1e-4)
    for one, right in zip(found, torch.autograd.grad(whole, leaves, grad.double()), strict=True):
        assert (one.double() - right).norm() < 0.01 * right.norm()


def test_micro_batches_of_similar_shapes_share_a_graph(double):
    for queries in ([5, 1, 60], [33, 20], [64] * 7):
        q, k, v, _, sequences = draw(queries, queries)
        module.cudnn_forward(q, k, v, sequences, 0.25)
    assert module._graph.cache_info().misses == 1


def test_training_attention_uses_it(double):
    q, k, v, grad, sequences = draw([40, 7], [40, 7])
    plan = SimpleNamespace(own=sequences, across=None, find_copies=lambda *_: None)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(flash.flash(*leaves, plan, 0.25), leaves, grad)
    assert double.executed == [2, 3]


@pytest.mark.parametrize("reason", ["short", "far", "deterministic", "no kernel"])
def test_flash_attention_remains_where_cudnn_cannot_compute(reason, double, monkeypatch):
    q, k, _, _, sequences = draw([40, 7], [40, 7])
    assert module.cudnn_supports(q, k, sequences, 0.25)
    module._graph.cache_clear()
    if reason == "short":
        monkeypatch.setattr(module, "_LEAST_WORK", q.numel() * 40 + 1)
    elif reason == "far":
        monkeypatch.setattr(module, "_FARTHEST", 100)
    elif reason == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    else:
        monkeypatch.setattr(double, "refuses", True)
    assert not module.cudnn_supports(q, k, sequences, 0.25)


def test_a_machine_without_a_gpu_has_none():
    assert not module.cudnn_runs(torch.device("cpu"))
