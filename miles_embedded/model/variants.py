"""Variants of one model that share most of its weights, and how a call computes tokens of several variants at once.

A plugin whose modules differ between policies, over weights that do not, marks the models of these policies (``mark_variant``). The engine
then runs one model for all of them: each token of a call has the index of its variant (``TokenVariants``), everything shared is computed once
for all tokens, and the plugin's modules (``VariantParts``) add what belongs to the variant of each token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

#: Key of the ``TokenVariants`` in ``Context.attached``.
VARIANTS = "variants"
_ATTRIBUTE = "miles_variant"


class VariantParts(ABC):
    """The modules of one model that hold the parts of all variants.

    Attributes:
        capacity: number of variants for which there is room; indices are below it.
    """

    capacity: int

    @abstractmethod
    def put(self, variant: int, model: nn.Module) -> None:
        """Use the parts of ``model`` for a variant, by copy. Makes room for a new one, which may move the tensors of all of them."""

    @abstractmethod
    def holds(self, variant: int, model: nn.Module) -> bool:
        """Whether the parts of a variant equal those of ``model``."""

    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors that calls read, whose addresses CUDA graphs contain."""


@dataclass(frozen=True)
class Variant:
    """What marks a model as a variant.

    Attributes:
        key: models with equal keys differ in their parts only.
        gather: prepares another model of this kind for the parts of all variants.
    """

    key: str
    gather: Callable[[nn.Module], VariantParts]


def mark_variant(model: nn.Module, variant: Variant) -> None:
    """Mark an engine's model, in ``on_model`` with the role ``rollout``."""
    model.__dict__[_ATTRIBUTE] = variant


def find_variant(model: nn.Module) -> Variant | None:
    """Return what marks the model; None if it shares no engine."""
    found: Variant | None = model.__dict__.get(_ATTRIBUTE)
    return found


class TokenVariants:
    """The variant of each token of a call, and the tokens grouped by it.

    The tokens are stored in entries of equal size, each with tokens of one variant: a product per entry computes all variants in one launch.
    An entry has as many tokens as a variant has on average, and a variant with more tokens has several entries, so that at most
    half of the places are padding, however the tokens are distributed.

    Args:
        index: [tokens] int64 variant of each token.
        capacity: number of variants.
        only: the variant of all tokens if the host knows it; None if they differ.
        static: whether the number of entries must not depend on the values of ``index``, as a CUDA graph requires.
    """

    def __init__(self, index: Tensor, capacity: int, only: int | None = None, static: bool = False) -> None:
        self.index, self.capacity, self.only, self.static = index, capacity, only, static

    def split(self, tokens: Tensor) -> Tensor:
        """Group tokens [tokens, n] by variant: [entries, size, n]. Padding has the values of a token."""
        gather, _, _, size = self._places
        return tokens.index_select(0, gather).view(-1, size, tokens.shape[-1])

    def join(self, entries: Tensor) -> Tensor:
        """Invert ``split``: [entries, size, n] -> [tokens, n]."""
        return entries.flatten(0, 1).index_select(0, self._places[1])

    def select(self, parts: Tensor) -> Tensor:
        """Return the part of each entry's variant: [capacity, ...] -> [entries, ...]."""
        entries = self._places[2]
        return parts if entries is None else parts.index_select(0, entries)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """[entries * size] token at each place, [tokens] place of each token, [entries] variant of each entry (None if there is one per variant,
        in order), and the size."""
        index, count, device = self.index, len(self.index), self.index.device
        hits = index[:, None] == torch.arange(self.capacity, device=device)
        found = hits.cumsum(0)
        tokens = found[-1]
        size = -(-count // (self.capacity if self.static else int((tokens > 0).sum())))
        entries = (tokens + (size - 1)) // size
        ends = entries.cumsum(0)
        place = (ends - entries)[index] * size + found.gather(1, index[:, None])[:, 0] - 1
        total = self.capacity + count // size if self.static else int(ends[-1])
        gather = torch.zeros(total * size, dtype=torch.int64, device=device)
        gather.index_copy_(0, place, torch.arange(count, device=device))
        if not self.static and total == self.capacity and bool((entries == 1).all()):
            return gather, place, None, size
        owner = torch.searchsorted(ends, torch.arange(total, device=device), right=True)
        return gather, place, owner.clamp(max=self.capacity - 1), size
