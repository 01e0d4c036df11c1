"""Loads checkpoints into this rank's chunks, and yields the weights as units for updates and exports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from miles_core.data import WeightUnit
from miles_core.plugin import CheckpointError
from miles_core.trainer import CheckpointFiles
from miles_megatron import families
from miles_megatron.architecture import Architecture
from miles_megatron.families.parts import MTP_PREFIX, Entry, transformer_engine_name
from miles_megatron.layout import join, shard
from miles_megatron.sizes import Sizes
from miles_megatron.trainer.model import has_transformer_engine, layer_numbers

#: Name prefix of the first MTP layer in Megatron-Core's model.
FIRST_MTP = "mtp.layers.0."


class Weights:
    """The tensors of this rank's chunks under their names in the whole model.

    Args:
        chunks: the chunks, not wrapped.
        a: the architecture.
        s: parallel sizes.
        mtp: module of the first MTP layer; None if MTP layers are not trained, and exports then copy them from the checkpoint.

    Attributes:
        held: name -> tensor on this rank.
        copy: the output layer's copy of a tied embedding on another pipeline stage, or None.
        changes: name -> function of the tensor on this rank; units contain its result (``Matrix.change``).
        unchanged: whether modules compute with the tensors as they are stored, in passes of the reference model.
        added_parameters: name -> parameter of a plugin and this rank's indices among those that store it (``Matrix.add_parameter``).
    """

    def __init__(self, chunks: Sequence[nn.Module], a: Architecture, s: Sizes, mtp: nn.Module | None = None) -> None:
        self.a, self.s = a, s
        self.source: Path | None = None
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}
        self.unchanged = False
        self.added_parameters: dict[str, tuple[nn.Parameter, tuple[int, int]]] = {}
        whole = list(families.weights(a))
        trained = ("decoder.", "embedding.", "output_layer.", *(() if mtp is None else (FIRST_MTP,)))
        self.entries = [entry for entry in whole if entry.name.startswith(trained)]
        self._others = [name for entry in whole if not entry.name.startswith(trained) for name in entry.checkpoint]
        named: dict[str, Tensor] = {}
        for chunk in chunks:
            named |= dict(_tensors(chunk, a, s, layer_numbers(chunk)))
        if mtp is not None:
            named |= {name.replace("layer.", FIRST_MTP, 1): t for name, t in _tensors(mtp, a, s)}
        self.held: dict[str, Tensor] = {}
        for entry in self.entries:
            name = transformer_engine_name(entry, a) if has_transformer_engine() else entry.name
            if name in named:
                self.held[entry.name] = named.pop(name)
        self.copy = named.pop("output_layer.weight", None) if a.tied else None
        if named:
            raise CheckpointError(
                f"the table of {a.family} lacks {len(named)} tensors of Megatron-Core's model, the first is {min(named)}"
            )

    def load(self, directory: Path) -> None:
        """Load a checkpoint into the chunks. Raises CheckpointError if a tensor is missing or has another shape.

        The first one decides whether routers are FP32 (see ``Experts.wide_router``)."""
        files = CheckpointFiles(directory)
        if self.source is None:
            self.source = directory
            self._widen_routers(files)
        with torch.no_grad():
            for entry in self.entries:
                wanted = [self.held[entry.name]] if entry.name in self.held else []
                if self.copy is not None and entry.name == "embedding.word_embeddings.weight":
                    wanted.append(self.copy)
                for held in wanted:
                    tensors = [_read(files, name) for name in entry.checkpoint]
                    held.copy_(self._part(entry, tensors, held))

    def _widen_routers(self, files: CheckpointFiles) -> None:
        if self.a.experts is None or not self.a.experts.wide_router:
            return
        for entry in self.entries:
            stored = files.entries.get(entry.checkpoint[0])
            if entry.name.endswith(".router.weight") and stored is not None and stored.dtype == torch.float32:
                held = self.held.get(entry.name)
                if held is not None:
                    held.data = held.data.float()

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of the checkpoint's tensors that belong to this rank's tensors."""
        assert self.source is not None
        found = CheckpointFiles(self.source).entries
        return {n: found[n].shape for e in self.entries if e.name in self.held for n in e.checkpoint}

    def untrained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors of untrained MTP layers, unchanged."""
        assert self.source is not None
        files = CheckpointFiles(self.source)
        others = [*self._others, *(name for name in files.entries if name.startswith(MTP_PREFIX))]
        yield from ((name, files.read(name)) for name in others if name in files.entries)

    def copies(self) -> dict[str, list[str]]:
        """Return name of the embedding or output layer -> names of its copies in the checkpoint's MTP layers."""
        assert self.source is not None
        entries = CheckpointFiles(self.source).entries
        layers = [f"model.layers.{self.a.layers + i}." for i in range(self.a.mtp)]
        head = "model.embed_tokens.weight" if self.a.tied else "lm_head.weight"
        found: dict[str, list[str]] = {}
        for original, copy in (("model.embed_tokens.weight", "embed_tokens.weight"), (head, "shared_head.head.weight")):
            found.setdefault(original, []).extend(layer + copy for layer in layers if layer + copy in entries)
        return found

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """Copy saved tensors back into ``held``. kept: name -> tensor."""
        with torch.no_grad():
            for name, tensor in kept.items():
                self.held[name].copy_(tensor)
            if self.copy is not None:
                self.copy.copy_(kept.get("embedding.word_embeddings.weight", self.copy))

    @contextmanager
    def as_reference(self, directory: Path | None) -> Iterator[None]:
        """Load the reference model's weights into the chunks; at exit restore the policy's weights, saved in host memory.

        Frozen weights under adapters are those of the reference model already."""
        if directory is None:
            raise RuntimeError("this trainer was built without a reference model")
        frozen = directory == self.source and not any(tensor.requires_grad for tensor in self.held.values())
        kept = {} if frozen else {name: tensor.detach().cpu().clone() for name, tensor in self.held.items()}
        if not frozen:
            self.load(directory)
        self.unchanged = True
        try:
            yield
        finally:
            self.unchanged = False
            if not frozen:
                self.restore(kept)

    def _part(self, entry: Entry, tensors: Sequence[Tensor], held: Tensor) -> Tensor:
        rank, size = self.place(entry)
        whole = shard(entry, tensors, self.a)
        part = whole if whole.shape == held.shape else shard(entry, tensors, self.a, rank, size)
        if part.shape != held.shape:
            shapes = f"{tuple(part.shape)} and not {tuple(held.shape)}"
            raise CheckpointError(
                f"{entry.checkpoint[0]} gives {entry.name} the shape {shapes}: does config.json belong to another model?"
            )
        return part

    def place(self, entry: Entry) -> tuple[int, int]:
        """Return rank and size in the group that splits a tensor."""
        if entry.expert is None:
            return parallel_state.get_tensor_model_parallel_rank(), self.s.tp
        return parallel_state.get_expert_tensor_parallel_rank(), self.s.etp

    def units(self, everywhere: bool) -> Iterator[WeightUnit]:
        """See ``Trainer.units``. Tensor-parallel ranks gather their shards. Every pipeline stage yields its own tensors without waiting for
        the others, and every expert-parallel rank its own experts, unless the checkpoint stacks the experts of a matrix in one tensor: then
        they are gathered too. With ``everywhere``, stages take turns, and every rank yields all tensors."""
        matrices = _group_by_matrix(self.entries)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        for entries, owner in zip(matrices, self._owners(matrices), strict=True):
            if owner != stage and not everywhere:
                continue
            apart = not everywhere and _is_sent_apart(entries)
            found: list[dict[str, Tensor]] = []
            if owner == stage:
                found = self._gather_own_experts(entries) if apart else self._gather_entries(entries)
            if everywhere:
                found = self._broadcast(found, owner)
            if everywhere or (_leads_experts() if apart else _leads()):
                yield from (unit for tensors in found for unit in _make_units(tensors))

    @property
    def sends(self) -> bool:
        """See ``World.sends``."""
        return _leads() or (_leads_experts() and any(map(_is_sent_apart, _group_by_matrix(self.entries))))

    def _owners(self, matrices: Sequence[Sequence[Entry]]) -> list[int]:
        """Return the first pipeline stage that has the tensors of each matrix. Stages wait for each other once, here."""
        if self.s.pp == 1:
            return [0] * len(matrices)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        owners = torch.tensor([stage if any(e.name in self.held for e in m) else self.s.pp for m in matrices])
        owners = owners.to(self._device)
        dist.all_reduce(owners, dist.ReduceOp.MIN, group=parallel_state.get_pipeline_model_parallel_group())
        return [int(owner) for owner in owners.tolist()]

    @property
    def _device(self) -> torch.device:
        return next(iter(self.held.values())).device

    @torch.no_grad()
    def _gather_own_experts(self, entries: Sequence[Entry]) -> list[dict[str, Tensor]]:
        """Gather the shards of this rank's experts of one matrix: a dict for each expert."""
        mine = (entry for entry in entries if entry.name in self.held)
        return [dict(zip(entry.checkpoint, self._gather_shards(entry), strict=True)) for entry in mine]

    @torch.no_grad()
    def _gather_entries(self, entries: Sequence[Entry]) -> list[dict[str, Tensor]]:
        """Gather the checkpoint's tensors of one entry, or of all experts' entries of one matrix, on this stage."""
        first = entries[0]
        if first.expert is None:
            return [dict(zip(first.checkpoint, self._gather_shards(first), strict=True))]
        group = parallel_state.get_expert_model_parallel_group()
        found: list[list[Tensor]] = []
        for entry in (e for e in entries if e.name in self.held):
            found.append(self._gather_shards(entry))
        by_expert = [[_gather(t, group, self.s.ep) for t in tensors] for tensors in found]
        experts: dict[int, list[Tensor]] = {}
        for j, gathered in enumerate(by_expert):
            for rank in range(self.s.ep):
                experts[rank * len(found) + j] = [parts[rank] for parts in gathered]
        if first.layout.startswith("stacked"):
            stacked = torch.stack([experts[e][0] for e in range(len(entries))])
            return [{first.checkpoint[0]: stacked}]
        return [dict(zip(e.checkpoint, experts[e.expert or 0], strict=True)) for e in entries]

    def _gather_shards(self, entry: Entry) -> list[Tensor]:
        held = self.held[entry.name].detach()
        if (change := self.changes.get(entry.name)) is not None:
            held = change(held)
        _rank, size = self.place(entry)
        if not self.is_cut(entry, held):
            return join(entry, [held], self.a)
        group = (
            parallel_state.get_tensor_model_parallel_group()
            if entry.expert is None
            else parallel_state.get_expert_tensor_parallel_group()
        )
        return join(entry, _gather(held, group, size), self.a)

    def is_cut(self, entry: Entry, held: Tensor) -> bool:
        """Whether a tensor is split across ranks. TransformerEngine replicates the down-projections of latent attention; the local
        modules split them."""
        if self.place(entry)[1] == 1:
            return False
        low = self.a.latent
        if low is not None and entry.name.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight")):
            whole = low.q_rank if ".linear_q_down_proj" in entry.name else low.kv_rank + low.rope
            return held.shape[0] != whole
        return entry.axis is not None

    def _broadcast(self, found: list[dict[str, Tensor]], owner: int) -> list[dict[str, Tensor]]:
        """Broadcast the owner's tensors to every pipeline stage."""
        if self.s.pp == 1:
            return found
        group = parallel_state.get_pipeline_model_parallel_group()
        source = dist.get_global_rank(group, owner)
        shapes: list[Any] = [[{n: (t.shape, t.dtype) for n, t in tensors.items()} for tensors in found]]
        dist.broadcast_object_list(shapes, source, group=group)
        result = found or [
            {n: torch.empty(shape, dtype=dtype, device=self._device) for n, (shape, dtype) in tensors.items()}
            for tensors in shapes[0]
        ]
        for tensors in result:
            for name, tensor in tensors.items():
                tensors[name] = tensor.contiguous()
                dist.broadcast(tensors[name], source, group=group)
        return result


def _tensors(chunk: nn.Module, a: Architecture, s: Sizes, numbers: Sequence[int] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and router correction biases of a chunk under the names of the whole model.

    numbers: indices of the chunk's decoder layers in the whole model."""
    per = (a.experts.count // s.ep) if a.experts else 0
    first = parallel_state.get_expert_model_parallel_rank() * per
    biases = ((n, b) for n, b in chunk.named_buffers() if n.endswith("router.expert_bias"))
    for name, tensor in (*chunk.named_parameters(), *biases):
        name = re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{numbers[int(m[1])]}.", name)
        name = re.sub(r"\.local_experts\.(\d+)\.", lambda m: f".local_experts.{int(m[1]) + first}.", name)
        name = re.sub(r"(\.experts\.linear_fc\d\.(?:weight|bias))(\d+)$", lambda m: f"{m[1]}{int(m[2]) + first}", name)
        yield name, tensor


def _make_units(tensors: dict[str, Tensor]) -> Iterator[WeightUnit]:
    """Yield one unit per tensor; gate and up of a layer form one unit, because a number format may encode them together."""
    if any("gate_proj" in name for name in tensors):
        yield WeightUnit(tensors)
    else:
        yield from (WeightUnit({name: tensor}) for name, tensor in tensors.items())


def _group_by_matrix(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Group the entries of all experts' copies of one matrix; other entries form groups of one. Keeps the order."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(re.sub(r"local_experts\.\d+\.", "", entry.name), []).append(entry)
    return list(found.values())


def _is_sent_apart(entries: Sequence[Entry]) -> bool:
    """Whether these are the experts of a matrix, each a tensor of its own in the checkpoint."""
    return entries[0].expert is not None and not entries[0].layout.startswith("stacked")


def _leads() -> bool:
    """Whether this is the rank that yields the gathered tensors of its pipeline stage."""
    return not (
        parallel_state.get_tensor_model_parallel_rank()
        or parallel_state.get_context_parallel_rank()
        or parallel_state.get_data_parallel_rank()
    )


def _leads_experts() -> bool:
    """Whether this is the rank that yields the experts of its expert-parallel rank and pipeline stage."""
    return not (parallel_state.get_expert_tensor_parallel_rank() or parallel_state.get_expert_data_parallel_rank())


def _gather(tensor: Tensor, group: Any, size: int) -> list[Tensor]:
    if size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _read(files: CheckpointFiles, name: str) -> Tensor:
    if name not in files.entries:
        raise CheckpointError(f"{files.directory}: no tensor {name}")
    return files.read(name)
