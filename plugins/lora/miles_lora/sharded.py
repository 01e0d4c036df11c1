"""Adapters in a trainer that joins matrices of the checkpoint and splits them among ranks (Megatron-Core).

Such a trainer offers its matrices in ``chunk.matrices``. A module computes with ``W + scale B A``, rounded once to the dtype of W, which is
also what weight syncs and exports send: engine and trainer use the same numbers. Each rank that has a shard of a matrix stores the complete
adapters of it, in the layout and with the initial values of the embedded trainer, so checkpoints in ``peft``'s format are the same, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from miles_embedded import mark_constant, views
from miles_lora import LoraOptions
from miles_lora.adapter import CHILD, Adapter, scale_of, split_experts
from miles_lora.targets import Target, find_targets

Pair = tuple[Tensor, Tensor]


class Matrix(Protocol):
    """A matrix of such a trainer; see ``miles_megatron.trainer.matrices.Matrix``."""

    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    expert: int | None
    module: nn.Module
    attribute: str
    leads: bool

    def add_parameter(self, name: str, value: Tensor) -> nn.Parameter: ...
    def shard_factors(self, factors: Sequence[Pair | None]) -> Pair: ...
    def change(self, function: Any) -> None: ...


@dataclass
class Part:
    """The adapter of a linear layer, or of one expert: A [rank, in] and B [out, rank]."""

    target: Target
    expert: int | None
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    leads: bool


class ShardedAdapters:
    """This rank's part of the adapters of one policy.

    Args:
        model: the policy's model without weights, whose layers the targets are.
        options: rank, scale and targets.
        seed: determines the initial values.

    Attributes:
        start: adapted parameter -> complete A and B of the adapter to start from; others start with a random A and B = 0.
    """

    def __init__(self, model: nn.Module, options: LoraOptions, seed: str) -> None:
        self.model, self.options, self._seed = model, options, seed
        self.start: Mapping[str, Pair] = {}
        self.targets = find_targets(model, options.target_modules)
        self.parts: list[Part] = []
        by_source = {target.source: target for target in self.targets}
        self._places = {
            view.name: (by_source[view.source], view.offset) for view in views(model) if view.source in by_source
        }
        self._initial = lru_cache(maxsize=4)(self._make_initial)

    def attach(self, chunk: Any) -> None:
        """Add adapters to the matrices of a chunk and freeze the rest."""
        mark_constant(chunk.parameters())
        for matrix in chunk.matrices:
            chosen = [self._places.get(name) for name in matrix.names]
            if any(place is not None for place in chosen):
                self._attach(matrix, chosen)

    def _attach(self, matrix: Matrix, chosen: Sequence[tuple[Target, int] | None]) -> None:
        first = next(place[0] for place in chosen if place is not None)
        own = matrix.module._modules.setdefault(CHILD, nn.ParameterDict())
        assert isinstance(own, nn.ParameterDict)
        if first.is_joined:  # one adapter for gate and up
            part = self._add(matrix, own, first)
            order = sorted(range(len(chosen)), key=lambda i: chosen[i][1])  # type: ignore[index]
            parts: list[Part | None] = [part] * len(chosen)
        else:
            parts = [None if place is None else self._add(matrix, own, place[0]) for place in chosen]
            order = []
        matrix.change(partial(self._change, matrix, parts, order))

    def _add(self, matrix: Matrix, own: nn.ParameterDict, target: Target) -> Part:
        a, b = self._initial(target.source)
        if target.is_joined:
            assert matrix.expert is not None
            experts = target.module.get_parameter(target.attribute).shape[0]
            right, left = reversed(split_experts(a, b, experts))
            a, b = right[matrix.expert], left[matrix.expert]
        name = target.source if matrix.expert is None else f"{target.source}.{matrix.expert}"
        key = f"{matrix.attribute}_{len(own) // 2}"
        for letter, value in (("A", a), ("B", b)):
            own[f"{key}_{letter}"] = matrix.add_parameter(f"{CHILD}.{name}.lora_{letter}", value.clone())
        self.parts.append(Part(target, matrix.expert, own[f"{key}_A"], own[f"{key}_B"], matrix.leads))
        return self.parts[-1]

    def _change(self, matrix: Matrix, parts: Sequence[Part | None], order: Sequence[int], weight: Tensor) -> Tensor:
        """Return ``W + scale B A`` for this rank's shard of W; ``order``: of the rows of one B that several matrices share."""
        factors: list[Pair | None] = [None if part is None else (part.lora_B, part.lora_A) for part in parts]
        if order:
            pieces = dict(zip(order, parts[0].lora_B.split([matrix.shapes[i][0] for i in order]), strict=True))  # type: ignore[union-attr]
            factors = [(pieces[i], parts[0].lora_A) for i in range(len(parts))]  # type: ignore[union-attr]
        return torch.addmm(weight, *matrix.shard_factors(factors), alpha=scale_of(self.options))

    def _make_initial(self, source: str) -> Pair:
        """Return complete A and B."""
        if source in self.start:
            return self.start[source]
        target = next(target for target in self.targets if target.source == source)
        adapter = _make_adapter(target, self.options, "cpu")
        adapter.reset(self._seed, source)
        return adapter.lora_A.detach(), adapter.lora_B.detach()

    def shapes(self) -> dict[str, tuple[torch.Size, torch.Size]]:
        """Return adapted parameter -> shapes of the complete A and B."""
        made = {target.source: _make_adapter(target, self.options, "meta") for target in self.targets}
        return {source: (adapter.lora_A.shape, adapter.lora_B.shape) for source, adapter in made.items()}

    def matrices(self) -> dict[str, Pair]:
        """Return source -> complete A and B, in the layout of ``Adapter``. A collective."""
        mine = {
            (p.target.source, p.expert): (p.lora_A.detach().cpu(), p.lora_B.detach().cpu()) for p in self._leading()
        }
        every = [mine]
        if torch.distributed.get_world_size() > 1:
            every = [{}] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(every, mine)
        found = {key: pair for each in every for key, pair in each.items()}
        result = {}
        for target in self.targets:
            if not target.is_joined:
                result[target.source] = found[target.source, None]
                continue
            experts = target.module.get_parameter(target.attribute).shape[0]
            pairs = [found[target.source, expert] for expert in range(experts)]
            left = torch.stack([b for _, b in pairs]).permute(1, 2, 0)
            result[target.source] = torch.cat([a for a, _ in pairs]), left.reshape(len(left), -1)
        return result

    def squared_norm(self) -> Tensor:
        """Return the squared Frobenius norm of all weight changes by adapters. A collective."""
        total = torch.zeros((), device=self.parts[0].lora_A.device)
        for part in self._leading():
            a, b = part.lora_A.detach().float(), part.lora_B.detach().float()
            total += ((b.t() @ b) * (a @ a.t())).sum()
        torch.distributed.all_reduce(total)
        return total * scale_of(self.options) ** 2

    def _leading(self) -> Iterator[Part]:
        return (part for part in self.parts if part.leads)


def _make_adapter(target: Target, options: LoraOptions, device: str) -> Adapter:
    weight = target.module.get_parameter(target.attribute)
    like = torch.empty(weight.shape, device=device)
    return Adapter(like, options, bool(getattr(target.module, "is_transposed", False)))
