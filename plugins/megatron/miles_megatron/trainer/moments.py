"""Saves and loads the optimizer's state: master weights and moments.

Each rank writes the elements that it updates to a separate file, without communication. Megatron-Core's format, which other parallel
sizes can load, gathers all elements on each data-parallel rank, and the first rank writes them. An index lists where the elements belong.
A *block* is the part of a tensor of the whole model that a parameter of one rank contains; a fused parameter has several blocks. A *piece* is a
range of the elements of a parameter. Loading copies pieces of equal blocks, and otherwise the intersections of blocks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from safetensors import safe_open
from torch import Tensor

from miles_core.plugin import CheckpointError
from miles_core.trainer import write_tensors
from miles_megatron.trainer.optimizer import Optimizer, Shard

INDEX = "index.json"


@dataclass(frozen=True)
class Block:
    """A part of a tensor of the whole model within a flattened parameter.

    Attributes:
        key: name of the tensor in the whole model.
        offset, size: the part, by dimension.
        strides, start: where the parameter stores it, in elements.
    """

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Block:
        """Inverse of ``dataclasses.asdict``."""
        offset, size, strides = (tuple(data[name]) for name in ("offset", "size", "strides"))
        return cls(data["key"], offset, size, strides, data["start"])

    def view(self, flat: Tensor, low: list[int], high: list[int]) -> Tensor:
        """Return the elements of the tensor from ``low`` to ``high``, as a view of the flattened parameter."""
        found = flat.as_strided(self.size, self.strides, flat.storage_offset() + self.start)
        for axis, (first, end) in enumerate(zip(low, high, strict=True)):
            found = found.narrow(axis, first - self.offset[axis], end - first)
        return found


@dataclass(frozen=True)
class Piece:
    """Saved elements ``first`` to ``end`` (exclusive) of a parameter. number: index in its file; numel: elements of the parameter."""

    file: str
    number: int
    first: int
    end: int
    numel: int


class ParameterBlocks:
    """The blocks of this rank's parameters.

    Args:
        state: the sharded state of the model, as Megatron-Core returns it.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        found = (each for each in nested_values(state) if isinstance(each, ShardedTensor | ShardedTensorFactory))
        self._states = {id(each.data): each for each in found if each.data is not None}

    def blocks(self, parameter: Tensor) -> list[Block]:
        """Return the blocks of a parameter. Raises CheckpointError if the state lacks it."""
        return [
            Block(
                each.key,
                tuple(each.global_offset),
                (1,) * each.prepend_axis_num + tuple(each.local_shape),
                (0,) * each.prepend_axis_num + each.data.stride(),
                int(each.data.storage_offset() - parameter.storage_offset()),
            )
            for each in self._tensors(parameter)
        ]

    def is_saved(self, parameter: Tensor) -> bool:
        """Whether this rank saves its elements of a parameter: other ranks outside its data-parallel group may have the same ones."""
        replica = self._tensors(parameter)[0].replica_id
        return not any(replica[:-1]) if isinstance(replica, tuple) else True

    def is_padded(self, parameter: Tensor) -> bool:
        """Whether the parameter has rows of padding, whose number depends on the parallel sizes."""
        return any(each.allow_shape_mismatch for each in self._tensors(parameter))

    def _tensors(self, parameter: Tensor) -> list[Any]:
        state = self._states.get(id(parameter))
        if state is None:
            raise CheckpointError(
                f"a parameter of shape {list(parameter.shape)} is trained, but the model's sharded state lacks it"
            )
        found = [state] if isinstance(state, ShardedTensor) else list(nested_values(state.build()))
        own = parameter.untyped_storage().data_ptr()
        if any(each.data.untyped_storage().data_ptr() != own for each in found):
            raise CheckpointError(f"Megatron-Core saves a copy of {found[0].key}, whose elements cannot be located")
        return found


def save_moments(optimizers: Mapping[str, tuple[Optimizer, ParameterBlocks]], directory: Path) -> None:
    """Write the state of this rank's optimizers. A collective of all ranks; ``directory`` must exist.

    Args:
        optimizers: name -> optimizer with allocated moments, and the model that it trains.
    """
    file = f"{dist.get_rank()}-of-{dist.get_world_size()}.safetensors"
    tensors: dict[str, Tensor] = {}
    entries: list[dict[str, Any]] = []
    for name, (optimizer, model) in optimizers.items():
        for shard in optimizer.shards():
            if model.is_saved(shard.parameter):
                piece = Piece(file, len(entries), shard.first, shard.end, shard.parameter.numel())
                blocks = [asdict(block) for block in model.blocks(shard.parameter)]
                entries.append({"optimizer": name, "piece": asdict(piece), "blocks": blocks})
                tensors |= {f"{piece.number}.{state}": tensor for state, tensor in shard.states.items()}
    if tensors:
        write_tensors(tensors, directory / file)
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(entries, gathered)
    if gathered is not None:
        (directory / INDEX).write_text(json.dumps([entry for each in gathered for entry in each]))


def load_moments(optimizers: Mapping[str, tuple[Optimizer, ParameterBlocks]], directory: Path, steps: int) -> None:
    """Load what ``save_moments`` wrote, also with other parallel sizes.

    Args:
        steps: number of steps in the moments.

    Raises:
        CheckpointError: the index is missing or malformed, or elements of a parameter were not saved."""
    saved = _Saved(directory)
    for name, (optimizer, model) in optimizers.items():
        optimizer.set_steps(steps)
        for shard in optimizer.shards():
            blocks, padded = model.blocks(shard.parameter), model.is_padded(shard.parameter)
            shard.store({state: saved.read(name, state, shard, blocks, padded) for state in shard.states})
        optimizer.finish_load()


class _Saved:
    """The saved pieces of all ranks."""

    def __init__(self, directory: Path) -> None:
        if not (directory / INDEX).is_file():
            raise CheckpointError(
                f"{directory} has no {INDEX}: the checkpoint is damaged, or an older version of miles-core saved it. Load it with that "
                "version and --export-hf, and give the export as --hf-checkpoint"
            )
        self._directory = directory
        self._files: dict[str, Any] = {}
        #: (optimizer, key) -> block -> the pieces of parameters with this block.
        self._blocks: dict[tuple[str, str], dict[Block, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        for entry in json.loads((directory / INDEX).read_text()):
            piece = Piece(**entry["piece"])
            for block in map(Block.from_json, entry["blocks"]):
                pieces = self._blocks[entry["optimizer"], block.key][block]
                if not _count(pieces, piece.first, piece.end):  # else another rank saved a copy
                    pieces.append(piece)

    def read(self, optimizer: str, state: str, shard: Shard, blocks: list[Block], padded: bool) -> Tensor:
        """Return the elements of a shard, float32 on the CPU."""
        pieces = [self._blocks[optimizer, block.key].get(block, []) for block in blocks]
        if all(_count(each, shard.first, shard.end) == shard.end - shard.first for each in pieces):
            return self._join(state, pieces[0], shard.first, shard.end)
        whole = torch.zeros(shard.parameter.numel())
        copied = sum(self._copy(optimizer, state, block, whole) for block in blocks)
        if copied != len(whole) and not padded:
            raise CheckpointError(
                f"{self._directory}: {copied:,} of {len(whole):,} elements of {blocks[0].key} ({state}) were saved; use an earlier checkpoint"
            )
        return whole[shard.first : shard.end].clone()

    def _copy(self, optimizer: str, state: str, block: Block, target: Tensor) -> int:
        """Copy the intersections of ``block`` with saved ones to the flattened parameter; return the number of elements."""
        copied = 0
        for saved, pieces in self._blocks[optimizer, block.key].items():
            low = [max(pair) for pair in zip(block.offset, saved.offset, strict=True)]
            ends = ([at + n for at, n in zip(b.offset, b.size, strict=True)] for b in (block, saved))
            high = [min(pair) for pair in zip(*ends, strict=True)]
            numel = pieces[0].numel
            if all(first < end for first, end in zip(low, high, strict=True)) and _count(pieces, 0, numel) == numel:
                source = self._join(state, pieces, 0, numel)
                block.view(target, low, high).copy_(saved.view(source, low, high))
                copied += prod(end - first for first, end in zip(low, high, strict=True))
        return copied

    def _join(self, state: str, pieces: list[Piece], start: int, stop: int) -> Tensor:
        """Read elements ``start`` to ``stop`` of a saved parameter."""
        found = torch.empty(stop - start)
        for piece, first, end in _intersections(pieces, start, stop):
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(self._directory / piece.file, framework="pt")
            values = self._files[piece.file].get_slice(f"{piece.number}.{state}")
            found[first - start : end - start] = values[first - piece.first : end - piece.first]
        return found


def _intersections(pieces: list[Piece], start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
    """Yield the pieces that contain elements of ``start`` to ``stop``, with the first one and the end of these."""
    for piece in pieces:
        first, end = max(start, piece.first), min(stop, piece.end)
        if first < end:
            yield piece, first, end


def _count(pieces: list[Piece], start: int, stop: int) -> int:
    """Return how many of the elements ``start`` to ``stop`` the pieces contain."""
    return sum(end - first for _, first, end in _intersections(pieces, start, stop))
