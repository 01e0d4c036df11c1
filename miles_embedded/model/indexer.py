"""Sparse attention of DeepSeek-V3.2: an indexer scores all keys for each query and keeps the best ones for attention.

Transformers' indexer modules are used unchanged. They expect separate sequences and a cache. A hook therefore runs the indexer's
forward in that form for each layout of a ``Call`` (buckets, cached rows), and lets the module process only a single row, whose result is
discarded. Attention receives as ``indices`` the ``ChosenKeys`` that its call made. Scores are computed for every query and key,
which costs memory and time that a kernel for sparse attention would save.

An indexer has no gradient, as in Transformers. ``torch.topk`` resolves ties.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.model.attention import ChosenKeys

#: Supported indexer classes. GLM's layers pass a choice on to the following layers.
KNOWN = ("DeepseekV32Indexer", "GlmMoeDsaIndexer")
#: Largest number of scores computed at once: queries * indexer heads * keys.
_SCORES = 1 << 26


@dataclass(frozen=True)
class Indexed:
    """An indexer and its inputs: tensors [rows, ...] in a call, [sequences, queries, ...] after padding.

    Attributes:
        module: the indexer.
        hidden: [..., hidden].
        query: [..., rank] latent query.
        cos: [..., rotary dimensions].
        sin: [..., rotary dimensions].
    """

    module: Any
    hidden: Tensor
    query: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def most(self) -> int:
        """Number of keys that a query keeps; with at most this many keys nothing is dropped."""
        return int(self.module.index_topk)

    def map(self, function: Callable[..., Tensor], *args: Any) -> Indexed:
        """Apply ``function(tensor, *args)`` to each tensor."""
        hidden, query, cos, sin = (function(x, *args) for x in (self.hidden, self.query, self.cos, self.sin))
        return replace(self, hidden=hidden, query=query, cos=cos, sin=sin)

    @torch.no_grad()
    def choose(self, extend: Callable[[Tensor], Tensor], seen: Tensor) -> Tensor:
        """Choose the keys of each query.

        Args:
            extend: called with the new keys [sequences, queries, dim]; returns all keys [sequences, keys, dim].
            seen: bool, [sequences or 1, queries, keys], keys that a query may attend to.

        Returns:
            bool, [sequences, queries, keys], a subset of ``seen``.
        """
        mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        inputs = (self.hidden, self.query, (self.cos, self.sin), mask)
        index = self.module.forward(*inputs, None, **{_cache_argument(type(self.module).forward): _Keys(extend)})
        kept = torch.zeros(*index.shape[:2], seen.shape[2], dtype=torch.bool, device=seen.device)
        return kept.scatter_(2, index.long(), True).logical_and_(seen)

    def keys(self) -> Tensor:
        """Return the indexer's own keys for these rows, [sequences, queries, dim]; no keys are chosen."""
        found: list[Tensor] = []

        def only_first(k: Tensor) -> Tensor:
            found.append(k)
            return k[:, :1]

        self.choose(only_first, torch.ones(*self.hidden.shape[:2], 1, dtype=torch.bool, device=self.hidden.device))
        return found[0]


def choose_in_parts(indexed: Indexed, before: Tensor | None, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Run ``Indexed.choose`` in parts, which bounds the memory of the scores, for rows that follow ``before`` and each other.

    Args:
        indexed: tensors [sequences, queries, ...].
        before: [sequences, keys, dim] keys in front of these rows, or None.
        seen: bool, [sequences or 1, queries, keys + queries].

    Returns:
        bool, [sequences, queries, keys + queries], and the keys of these rows [sequences, queries, dim].
    """
    sequences, queries = indexed.hidden.shape[:2]
    ahead = seen.shape[2] - queries
    whole = torch.zeros(sequences, queries, seen.shape[2], dtype=torch.bool, device=seen.device)
    heads = int(indexed.module.n_heads)
    rows = max(1, _SCORES // (heads * seen.shape[2]))
    step = min(rows, queries)
    found = []
    for at in torch.arange(sequences).split(max(1, rows // step)):
        some = slice(int(at[0]), int(at[-1]) + 1)
        keys = [] if before is None else [before[some]]

        def extend(k: Tensor, keys: list[Tensor] = keys) -> Tensor:
            keys.append(k)
            return torch.cat(keys, 1)

        for start in range(0, queries, step):
            part, end = slice(start, start + step), ahead + min(start + step, queries)
            allowed = (seen if len(seen) == 1 else seen[some])[:, part, :end]
            whole[some, part, :end] = indexed.map(Tensor.__getitem__, (some, part)).choose(extend, allowed)
        found.append(torch.cat(keys, 1)[:, ahead:])
    return whole, torch.cat(found)


class _Keys:
    """Cache interface of the indexer, backed by a function."""

    def __init__(self, extend: Callable[[Tensor], Tensor]) -> None:
        self._extend = extend

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Return the keys to choose from."""
        return self._extend(keys)


class _Chosen:
    """Passed to the indexer's forward as its cache, so that the forward hook finds the choice."""

    def __init__(self, choice: ChosenKeys) -> None:
        self.choice = choice

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Return the keys of the single row."""
        return keys


@functools.cache
def _cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the cache argument, which Transformers 5.24 renamed."""
    names = inspect.signature(inspect.unwrap(forward)).parameters
    return "cache" if "cache" in names else "past_key_values"


def watch_indexer(indexer: nn.Module, call: Callable[[], Any]) -> None:
    """Make the ``Call`` returned by ``call()`` choose instead of ``indexer``; if it is None, the indexer runs normally."""

    name = _cache_argument(type(indexer).forward)

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if call() is None:
            return None
        hidden, query, (cos, sin) = args[:3]
        with torch.no_grad():
            choice = call().choose(Indexed(module, hidden[0], query[0], cos[0], sin[0]))
        first = (hidden[:, :1], query[:, :1], (cos[:, :1], sin[:, :1]), hidden.new_zeros(1, 1, 1), None)
        return first, {name: _Chosen(choice)}

    def after(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> ChosenKeys | None:
        cache = kwargs.get(name)
        return cache.choice if isinstance(cache, _Chosen) else None

    indexer.register_forward_pre_hook(before, with_kwargs=True)
    indexer.register_forward_hook(after, with_kwargs=True)
