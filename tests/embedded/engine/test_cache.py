"""The cache: rows come, grow and go in any order, and attention still sees what was written."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.contracts.trainer import Context
from miles_embedded.engine.attention import DecodeCall, PromptCall
from miles_embedded.engine.cache import Cache, CachedRows
from miles_embedded.model.attention import AttentionOptions

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 6, 5


class Layer:
    layer_idx = 0


class Mirror:
    """The same rows as plain lists of key and value vectors, attended to one query at a time."""

    def __init__(self, prompt_k, prompt_v):
        self.k, self.v = [*prompt_k], [*prompt_v]

    def attend(self, query, scaling, options=None):
        options = options or AttentionOptions()
        k, v = (torch.stack(x[-options.window :]) for x in (self.k, self.v))  # [t, kv_heads, dim]
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("hd,thd->ht", query, k) * scaling
        if options.sinks is not None:
            scores = torch.cat([scores, options.sinks[:, None]], 1)
        return torch.einsum("ht,the->he", scores.softmax(-1)[:, : len(k)], v)


def draw(tokens, generator):
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return [torch.randn(tokens, *s, generator=generator) for s in shapes]


def as_model(t):
    return t.transpose(0, 1).unsqueeze(0)


def context(tokens):
    return Context("rollout", (0,), torch.arange(tokens))


class Pool:
    """Drives a cache and its mirror together."""

    def __init__(self, seed, options=None):
        self.options = options
        self.cache, self.rows, self.g = Cache(), [], torch.Generator().manual_seed(seed)

    def admit(self, lengths, members):
        slots = self.cache.add_prefixes(lengths)
        q, k, v = draw(sum(lengths), self.g)
        call = PromptCall(context(sum(lengths)), lengths, self.cache, slots)
        out = call.attend(Layer(), as_model(q), as_model(k), as_model(v), 0.3, self.options)[0]
        ends = np.cumsum(lengths)
        for slot, length, end in zip(slots, lengths, ends, strict=True):
            mirror = Mirror([], [])
            for i in range(end - length, end):
                mirror.k.append(k[i])
                mirror.v.append(v[i])
                torch.testing.assert_close(out[i], mirror.attend(q[i], 0.3, self.options), atol=1e-5, rtol=1e-4)
            self.cache.add_rows([slot] * members)
            self.rows += [Mirror(mirror.k, mirror.v) for _ in range(members)]

    def feed(self, slots, counts):
        held = CachedRows(self.cache, np.asarray(slots), np.asarray(counts), torch.device("cpu"))
        q, k, v = draw(sum(counts), self.g)
        call = DecodeCall(context(sum(counts)), held)
        out = call.attend(Layer(), as_model(q), as_model(k), as_model(v), 0.3, self.options)[0]
        self.cache.own.lengths[slots] += counts
        at = 0
        for slot, count in zip(slots, counts, strict=True):
            for _ in range(count):
                self.rows[slot].k.append(k[at])
                self.rows[slot].v.append(v[at])
                expected = self.rows[slot].attend(q[at], 0.3, self.options)
                torch.testing.assert_close(out[at], expected, atol=1e-5, rtol=1e-4)
                at += 1

    def remove(self, dead):
        where, whence, _ = self.cache.remove_rows(np.asarray(sorted(dead)))
        for to, source in zip(where, whence, strict=True):
            self.rows[to] = self.rows[source]
        del self.rows[self.cache.rows :]


OPTIONS = [
    None,
    AttentionOptions(7),
    AttentionOptions(0, torch.tensor([0.5, -1.0, 3.0, 0.0])),
    AttentionOptions(3, torch.tensor([0.5, -1.0, 3.0, 0.0])),
]


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 1000), options=st.sampled_from(OPTIONS))
def test_any_sequence_of_admissions_steps_truncations_and_departures(data, seed, options):
    pool = Pool(seed, options)
    for _ in range(data.draw(st.integers(2, 8))):
        count = len(pool.rows)
        action = data.draw(st.sampled_from(["admit", "step", "ragged", "some", "remove", "truncate"]))
        if action == "admit" or not count:
            lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
            pool.admit(lengths, data.draw(st.integers(1, 4)))
        elif action == "step":
            pool.feed(list(range(count)), [1] * count)
        elif action == "ragged":
            pool.feed(list(range(count)), data.draw(st.lists(st.integers(1, 18), min_size=count, max_size=count)))
        elif action == "some":
            slots = data.draw(st.lists(st.sampled_from(range(count)), unique=True, min_size=1))
            pool.feed(slots, [2] * len(slots))
        elif action == "remove":
            pool.remove(data.draw(st.sets(st.sampled_from(range(count)), min_size=1)))
        else:
            for slot in range(count):
                own = int(pool.cache.own.lengths[slot])
                drop = data.draw(st.integers(0, own))
                pool.cache.own.lengths[slot] -= drop
                mirror = pool.rows[slot]
                mirror.k, mirror.v = mirror.k[: len(mirror.k) - drop], mirror.v[: len(mirror.v) - drop]
    if pool.rows:
        pool.feed(list(range(len(pool.rows))), [1] * len(pool.rows))
    cache, slots = pool.cache, np.arange(len(pool.rows))
    assert list(cache.prefixes.lengths[cache.prefix_of[slots]] + cache.own.lengths[slots]) == [
        len(r.k) for r in pool.rows
    ]


def test_a_prompt_is_held_once_and_freed_with_its_last_row():
    pool = Pool(0)
    pool.admit([5, 7], 3)
    assert pool.cache.prefixes.size == 2 and pool.cache.rows == 6
    pool.remove({0, 1})
    assert pool.cache.prefixes.size == 2
    pool.remove({i for i in range(4) if pool.cache.prefix_of[i] == 0})
    assert pool.cache.prefixes.size == 1 and pool.cache.rows == 3
    pool.feed([0, 1, 2], [1, 1, 1])
    pool.remove({0, 1, 2})
    assert pool.cache.prefixes.size == 0 and pool.cache.rows == 0


def test_a_step_copies_nothing():
    pool = Pool(0)
    pool.admit([4], 4)
    pool.feed([0, 1, 2, 3], [1, 1, 1, 1])
    before = {k: t.data_ptr() for k, t in pool.cache.own.slabs.items()}
    for _ in range(10):
        pool.feed([0, 1, 2, 3], [1, 1, 1, 1])
    assert {k: t.data_ptr() for k, t in pool.cache.own.slabs.items()} == before


def test_half_precision_attention_is_close_to_float32():
    pool, lengths = Pool(0), [6]
    q, k, v = (t.bfloat16() for t in draw(6, pool.g))
    slots = pool.cache.add_prefixes(lengths)
    PromptCall(context(6), lengths, pool.cache, slots).attend(Layer(), as_model(q), as_model(k), as_model(v), 0.3)
    pool.cache.add_rows([0, 0])
    mirrors = [Mirror(k.float(), v.float()) for _ in range(2)]
    held = CachedRows(pool.cache, np.arange(2), np.array([3, 1]), torch.device("cpu"))
    q, k, v = (t.bfloat16() for t in draw(4, pool.g))
    out = DecodeCall(context(4), held).attend(Layer(), as_model(q), as_model(k), as_model(v), 0.3)[0]
    assert out.dtype == torch.bfloat16
    for at, row in enumerate((0, 0, 0, 1)):
        mirrors[row].k.append(k[at].float())
        mirrors[row].v.append(v[at].float())
        torch.testing.assert_close(out[at].float(), mirrors[row].attend(q[at].float(), 0.3), atol=0.02, rtol=0.02)
