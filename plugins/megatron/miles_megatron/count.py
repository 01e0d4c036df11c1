"""Counts the parameters of a model by the kind of parallelism that splits them. Imports no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from miles_megatron.architecture import Architecture, Kind


@dataclass(frozen=True)
class Count:
    """Numbers of parameters.

    Attributes:
        split: parameters split across tensor-parallel ranks.
        whole: parameters replicated on every tensor-parallel rank (norms, routers, down-projections of latent attention).
        experts: parameters of routed experts, split across expert- and expert-tensor-parallel ranks.
    """

    split: int = 0
    whole: int = 0
    experts: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.split + other.split, self.whole + other.whole, self.experts + other.experts)

    def __mul__(self, times: int) -> Count:
        return Count(self.split * times, self.whole * times, self.experts * times)

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.split + self.whole + self.experts


def attention(a: Architecture) -> Count:
    """Count the parameters of one layer's attention."""
    if a.latent is not None:
        q, low = a.latent.q_rank, a.latent
        outputs = a.heads * (low.nope + low.rope)
        queries = Count(outputs * q, a.hidden * q + q) if q else Count(outputs * a.hidden)
        keys = Count(a.heads * (low.nope + low.value) * low.kv_rank, a.hidden * (low.kv_rank + low.rope) + low.kv_rank)
        return queries + keys + Count(a.heads * low.value * a.hidden)
    both = a.q_size + 2 * a.kv_size
    norms = {"": 0, "head": 2 * a.head_dim, "whole": a.q_size + a.kv_size}[a.qk_norm]
    gate = a.q_size if a.output_gate else 0
    split = (both + gate + a.q_size) * a.hidden + (both if a.qkv_bias else 0) + (a.heads if a.sinks else 0)
    return Count(split, norms + (a.hidden if a.out_bias else 0))


def delta(a: Architecture) -> Count:
    """Count the parameters of one layer's gated delta net."""
    assert a.delta is not None
    d = a.delta
    joined = 2 * d.keys + d.values  # channels of the convolution
    return Count(
        (joined + 2 * d.values + 2 * d.value_heads) * a.hidden + joined * d.width + 2 * d.value_heads, d.value_size
    )


def mamba(a: Architecture) -> Count:
    """Count the parameters of one layer's Mamba-2 mixer."""
    assert a.mamba is not None
    d = a.mamba
    joined = d.inner + 2 * d.shared  # channels of the convolution
    return Count((joined + 2 * d.inner + d.heads) * a.hidden + joined * (d.width + 1) + 3 * d.heads + d.inner)


def feed_forward(a: Architecture, sparse: bool) -> Count:
    """Count the parameters of one layer's feed-forward part: an MLP, or router, experts and shared experts."""
    matrices = 3 if a.gated else 2
    if not sparse or a.experts is None:
        return Count(matrices * a.hidden * a.ffn)
    e = a.experts
    router = a.hidden * e.count + (e.count if a.mlp_bias else 0) + (a.hidden if e.shared_gate else 0)
    biases = 2 * e.ffn + a.hidden if a.mlp_bias else 0
    latent = 2 * a.hidden * e.latent
    one = matrices * (e.latent or a.hidden) * e.ffn + biases
    return Count(matrices * a.hidden * e.shared, router + latent, e.count * one)


def layer(a: Architecture, kind: Kind) -> Count:
    """Count the parameters of one decoder layer."""
    total = Count()
    if kind.mixer != "none":
        total += {"attention": attention, "delta": delta, "mamba": mamba}[kind.mixer](a) + Count(whole=a.hidden)
    if kind.feed:
        total += feed_forward(a, kind.sparse) + Count(whole=a.hidden)
    return total


def embedding(a: Architecture) -> Count:
    """Count the parameters of the embedding; the output layer has as many."""
    return Count(a.vocab * a.hidden)


def mtp_layer(a: Architecture) -> Count:
    """Count the parameters of one MTP layer: a decoder layer, the projection of its two inputs, and three norms."""
    return layer(a, a.mtp_kind) + Count(2 * a.hidden * a.hidden, 3 * a.hidden)


def model(a: Architecture, mtp: int = 0) -> Count:
    """Count the parameters of the whole model with ``mtp`` MTP layers."""
    total = embedding(a) + Count(whole=a.hidden)
    if not a.tied:
        total += embedding(a)
    for kind, layers in Counter(a.kinds).items():
        total += layer(a, kind) * layers
    return total + mtp_layer(a) * mtp
