"""Sparse attention as DeepSeek-V3.2 has it: an indexer in front of attention scores all keys for each query and keeps a few.

The indexer of Transformers stays as it is. It expects sequences side by side, and a cache; so a hook runs its forward once a
layout of ours (buckets, cached rows) with exactly that, and the module itself then only sees a single row whose result is thrown
away. What attention gets as ``indices`` is the ``ChosenKeys`` that its call made. Scores are formed for every query and key, which costs
memory and time that a kernel for sparse attention would not need.

An indexer has no gradient, here as in Transformers. Where a key's score equals another's, ``torch.topk`` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.model.attention import ChosenKeys

#: Classes whose forward this file knows; GLM's layers pass a choice on to the layers that follow.
KNOWN = ("DeepseekV32Indexer", "GlmMoeDsaIndexer")
#: Scores at once: queries x indexer heads x keys.
_SCORES = 1 << 26


@dataclass(frozen=True)
class Indexed:
    """An indexer and what it was given: tensors [rows, ...] in a call, [sequences, queries, ...] once they are laid out.

    Attributes:
        module: the indexer.
        hidden: [..., hidden].
        query: [..., rank] the latent query.
        cos: [..., rotary dimensions].
        sin: like ``cos``.
    """

    module: Any
    hidden: Tensor
    query: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def most(self) -> int:
        """Keys that a query may keep: with no more than these, there is nothing to choose."""
        return int(self.module.index_topk)

    def map(self, function: Callable[..., Tensor], *args: Any) -> Indexed:
        """With ``function(tensor, *args)`` for each tensor."""
        hidden, query, cos, sin = (function(x, *args) for x in (self.hidden, self.query, self.cos, self.sin))
        return replace(self, hidden=hidden, query=query, cos=cos, sin=sin)

    @torch.no_grad()
    def choose(self, extend: Callable[[Tensor], Tensor], seen: Tensor) -> Tensor:
        """The keys each query keeps.

        Args:
            extend: given the new keys [sequences, queries, dim], returns all keys [sequences, keys, dim].
            seen: bool, [sequences or 1, queries, keys], what a query may look at.

        Returns:
            bool, [sequences, queries, keys], within ``seen``.
        """
        mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        inputs = (self.hidden, self.query, (self.cos, self.sin), mask)
        index = self.module.forward(*inputs, None, past_key_values=_Keys(extend))
        kept = torch.zeros(*index.shape[:2], seen.shape[2], dtype=torch.bool, device=seen.device)
        return kept.scatter_(2, index.long(), True).logical_and_(seen)

    def keys(self) -> Tensor:
        """[sequences, queries, dim] of these rows, without choosing."""
        found: list[Tensor] = []

        def only_first(k: Tensor) -> Tensor:
            found.append(k)
            return k[:, :1]

        self.choose(only_first, torch.ones(*self.hidden.shape[:2], 1, dtype=torch.bool, device=self.hidden.device))
        return found[0]


def chosen(indexed: Indexed, before: Tensor | None, seen: Tensor) -> tuple[Tensor, Tensor]:
    """``Indexed.choose`` for rows that follow ``before`` and each other, a part at a time, so that scores stay bounded.

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
    """What the indexer takes for a cache."""

    def __init__(self, extend: Callable[[Tensor], Tensor]) -> None:
        self._extend = extend

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """The keys to choose from."""
        return self._extend(keys)


class _Chosen:
    """Rides through the indexer's forward as its cache, to be found by the hook behind it."""

    def __init__(self, choice: ChosenKeys) -> None:
        self.choice = choice

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """The single row's own."""
        return keys


def watch_indexer(indexer: nn.Module, call: Callable[[], Any]) -> None:
    """Make the ``Call`` that ``call()`` returns choose, instead of ``indexer``; without a call the indexer chooses by itself."""

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if call() is None:
            return None
        hidden, query, (cos, sin) = args[:3]
        with torch.no_grad():
            choice = call().choose(Indexed(module, hidden[0], query[0], cos[0], sin[0]))
        first = (hidden[:, :1], query[:, :1], (cos[:, :1], sin[:, :1]), hidden.new_zeros(1, 1, 1), None)
        return first, {"past_key_values": _Chosen(choice)}

    def behind(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> ChosenKeys | None:
        cache = kwargs.get("past_key_values")
        return cache.choice if isinstance(cache, _Chosen) else None

    indexer.register_forward_pre_hook(before, with_kwargs=True)
    indexer.register_forward_hook(behind, with_kwargs=True)
