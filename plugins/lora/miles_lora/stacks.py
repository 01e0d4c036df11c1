"""The adapters of several policies in one model, which adds to each token those of its policy.

A layer's adapters are stored in two tensors, A [policies, rank, in] and B [policies, rank, out], padded with zeros to the largest rank. The
tokens of a call are grouped by policy (``TokenVariants``), so two batched products compute the adapters of all policies, after one
product of the base. A call with tokens of one policy uses its adapters as an engine of that policy alone does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from miles_core.plugin import MilesError
from miles_embedded import VARIANTS, TokenVariants, VariantParts, active_context
from miles_lora.adapter import CHILD, Adapter


class Stack(nn.Module):
    """The adapters of one linear layer.

    Attributes:
        adapters: variant -> its adapter.
    """

    def __init__(self, path: str, like: Adapter) -> None:
        super().__init__()
        self.path = path
        self.adapters: dict[int, Adapter] = {}
        a, b = like.lora_A, like.lora_B
        self._a, self._b = a.new_zeros(0, 0, a.shape[1]), b.new_zeros(0, 0, b.shape[0])
        self._scale = a.new_zeros(0, 1, 1, dtype=torch.float32)

    @torch.no_grad()
    def put(self, variant: int, adapter: Adapter, capacity: int) -> None:
        """Copy an adapter."""
        self.adapters[variant] = adapter
        rank, most = adapter.rank, self._a.shape[1]
        if capacity > len(self._a) or rank > most:
            more = (0, 0, 0, max(rank - most, 0), 0, capacity - len(self._a))
            self._a, self._b = (nn.functional.pad(each, more) for each in (self._a, self._b))
            self._scale = nn.functional.pad(self._scale, (0, 0, 0, 0, 0, capacity - len(self._scale)))
        for stored, matrix in ((self._a, adapter.lora_A), (self._b, adapter.lora_B.t())):
            stored[variant, :rank] = matrix
            stored[variant, rank:] = 0
        self._scale[variant] = adapter.scale

    def holds(self, variant: int, adapter: Adapter) -> bool:
        """Whether the stored matrices are those of an adapter."""
        pairs = ((self._a, adapter.lora_A), (self._b, adapter.lora_B.t()))
        return all(torch.equal(stored[variant, : adapter.rank], matrix) for stored, matrix in pairs)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a call reads."""
        yield from (self._a, self._b, self._scale)

    def forward(self, output: Tensor, x: Tensor) -> Tensor:
        """Add ``scale B (A x)`` of each token's policy to the output [..., out] of the layer for the input x [..., in]."""
        ctx = active_context()
        assert ctx is not None
        tokens: TokenVariants = ctx.attached[VARIANTS]
        if tokens.only is not None:
            found: Tensor = self.adapters[tokens.only](output, x)
            return found
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) != len(tokens.index):
            raise MilesError(
                f"{self.path} computes {len(rows)} rows for {len(tokens.index)} tokens, so it is not known which adapter a row needs; start "
                "with --lora-separate-engines, or leave the layer out of --lora-target-modules"
            )
        inner = torch.bmm(tokens.split(rows), tokens.select(self._a).transpose(1, 2)).mul_(tokens.select(self._scale))
        return output + tokens.join(torch.bmm(inner, tokens.select(self._b))).view(*x.shape[:-1], -1)


class Stacks(VariantParts):
    """The stacks of all adapted layers of a model, which replace its own adapters."""

    def __init__(self, model: nn.Module) -> None:
        self.capacity = 0
        self._stacks = {path: Stack(path, adapter) for path, adapter in _adapters_of(model).items()}
        for path, stack in self._stacks.items():
            model.get_submodule(path)._modules[CHILD] = stack

    def put(self, variant: int, model: nn.Module) -> None:
        if variant >= self.capacity:
            self.capacity = max(variant + 1, 2 * self.capacity)
        for path, adapter in _adapters_of(model).items():
            self._stacks[path].put(variant, adapter, self.capacity)

    def holds(self, variant: int, model: nn.Module) -> bool:
        return all(self._stacks[path].holds(variant, adapter) for path, adapter in _adapters_of(model).items())

    def tensors(self) -> Iterator[Tensor]:
        for stack in self._stacks.values():
            yield from stack.tensors()


def _adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of linear layers, which are all that a variant may have, by the name of the layer."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}
    assert not any(adapter.experts for adapter in found.values())
    return {name.removesuffix(f".{CHILD}"): adapter for name, adapter in found.items()}
