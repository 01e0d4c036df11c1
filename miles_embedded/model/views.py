"""Checkpoint tensors as views of module parameters, which may be sharded across processes.

Transformers stores all experts of a layer in one parameter, with gate and up joined; a checkpoint has a tensor per expert and
projection. Transformers declares these conversions, and every supported conversion consists of slices: a checkpoint tensor is a view of
one module tensor. The conversion is run once on tensors without data, which gives the list of views. Export and load then use this
list in either direction, without arithmetic and without repeating the conversion rules.

Some families' checkpoints also store all experts of a layer in one tensor. Number formats split them (``precision.fused_experts``),
again by slices.

FSDP2 stores a parameter as a ``DTensor``: each process has ``ceil(rows / processes)`` consecutive rows of the first dimension, the last
processes fewer or none. The rest of this backend uses plain tensors, through these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion

from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import CheckpointError, first_line
from miles_embedded.model.parts import configuration
from miles_embedded.model.storage import (
    LocalShard,
    codes_of,
    full_values,
    is_constant,
    is_streamed,
    is_whole,
    local_shard,
)
from miles_formats.fused_experts import Expert, Family, is_joined, split_experts

#: Names of the two projections that a number format encodes with one scale: gate -> up.
_COUPLED = {"gate_proj": "up_proj", "w1": "w3"}

#: Copies the second tensor to the first.
Copy = Callable[[Tensor, Tensor], object]

_known: WeakKeyDictionary[nn.Module, tuple[tuple, _Layout]] = WeakKeyDictionary()


@dataclass(frozen=True)
class View:
    """A checkpoint tensor: ``size``, ``stride`` and ``offset`` (in elements) into the module tensor ``source``."""

    name: str
    source: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this view of the module tensor."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def write_shard(self, shard: LocalShard, tensor: Tensor) -> None:
        """Copy the checkpoint tensor to the local shard of the module tensor."""
        # Entries along the dimension with the largest stride are consecutive in memory, so a shard contains a range of them.
        along = max(range(len(self.size)), key=lambda d: (self.size[d] > 1, self.stride[d]))
        step, (start, end) = self.stride[along], shard.elements
        first = max(-(-(start - self.offset) // step), 0)
        count = min(-(-(end - self.offset) // step), self.size[along]) - first
        if count > 0:
            size = (*self.size[:along], count, *self.size[along + 1 :])
            at = shard.tensor.storage_offset() + self.offset + first * step - start
            shard.tensor.as_strided(size, self.stride, at).copy_(tensor.narrow(along, first, count))

    def part(self, expert: Expert) -> View:
        """Return the view of one matrix; this view contains all experts."""
        stride, offset = expert.within(self.stride[1:])
        offset += self.offset + expert.index * self.stride[0]
        return View(expert.name, self.source, expert.shape, stride, offset)


@dataclass(frozen=True)
class Row:
    """Views of one module tensor that have the same layout and equal distances, such as a projection of all experts. They are sliced
    in one call: thousands of calls would take longer than the copy of the weights."""

    names: tuple[str, ...]
    first: View
    step: int

    def slice(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Return (name, view) pairs of the module tensor."""
        if len(self.names) == 1:
            return zip(self.names, (self.first.of(tensor),), strict=True)
        return zip(self.names, self.stack(tensor).unbind(0), strict=True)

    def stack(self, tensor: Tensor) -> Tensor:
        """Return all of them as one view of the module tensor, [tensors, *size]."""
        view = self.first
        offset = tensor.storage_offset() + view.offset
        return tensor.as_strided((len(self.names), *view.size), (self.step, *view.stride), offset)


def find_rows(members: Iterable[View]) -> list[Row]:
    """Group the views of one module tensor."""
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[View]] = {}
    for view in members:
        alike.setdefault((view.size, view.stride), []).append(view)
    found = []
    for group in alike.values():
        step = group[1].offset - group[0].offset if len(group) > 1 else 0
        equal = step > 0 and all(view.offset == group[0].offset + i * step for i, view in enumerate(group))
        for row in [group] if equal else [[view] for view in group]:
            found.append(Row(tuple(view.name for view in row), row[0], step))
    return found


class _Layout:
    """How a model's checkpoint is stored in its module tensors.

    Attributes:
        views: every checkpoint tensor in module order.
        by_name: the same by name.
        units: the tensors of each unit of the export, and the module tensors that no later unit contains.
    """

    def __init__(self, views: list[View]) -> None:
        self.views, self.by_name = views, {view.name: view for view in views}
        units = list(group_coupled(views))
        last = {view.source: number for number, members in enumerate(units) for view in members}
        ends: list[list[str]] = [[] for _ in units]
        for source, number in last.items():
            ends[number].append(source)
        self.units = list(zip(units, ends, strict=True))
        members: dict[str, list[View]] = {}
        for view in views:
            members.setdefault(view.source, []).append(view)
        self._rows = {source: find_rows(inside) for source, inside in members.items()}
        self._slices: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}

    def slice(self, source: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return name -> view of ``tensor`` for each checkpoint tensor that is stored in the module tensor ``source``. ``tensor`` has the
        values of ``source``."""
        return {name: view for row in self._rows[source] for name, view in row.slice(tensor)}

    def slice_parameter(self, source: str, home: Tensor) -> dict[str, Tensor]:
        """Return ``slice`` of a module tensor itself; the same views until it gets other memory."""
        known = self._slices.get(source)
        if known is None or known[0].data_ptr() != home.data_ptr() or known[0].dtype != home.dtype:
            whole = home.detach()
            known = self._slices[source] = whole, self.slice(source, whole)
        return known[1]


def _layout_of(model: nn.Module, state: Mapping[str, Tensor]) -> _Layout:
    """Return the layout of a model with ``sources`` ``state``. Cached until the modules change."""
    shapes = tuple([(n, t.shape, t.stride()) for n, t in state.items()])
    known = _known.get(model)
    if known is None or known[0] != shapes:
        known = _known[model] = (shapes, _Layout(_derive(model)))
    return known[1]


def views(model: nn.Module) -> list[View]:
    """Return every tensor of the model's checkpoint in module order, tied tensors once. Cached until the modules change."""
    return _layout_of(model, sources(model)).views


def matrices(model: nn.Module, experts: Callable[[str, tuple[int, ...]], list[Expert]]) -> list[View]:
    """Return ``views`` with the tensors that contain all experts split into matrices.

    Args:
        model: prepared by ``miles_embedded.model.load``.
        experts: (checkpoint name, shape) -> its experts, as ``Codec.experts``.
    """
    return [v for view in views(model) for v in [view.part(x) for x in experts(view.name, view.size)] or [view]]


def sources(model: nn.Module) -> dict[str, Tensor]:
    """Return the module tensors that a checkpoint consists of, by name; tied tensors once."""
    return _without_ties(model)[0]


def _without_ties(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return ``sources``, and the names that a checkpoint omits because of shared storage: omitted name -> stored name."""
    state = model.state_dict(keep_vars=True)
    declared = {
        f"{path}.{a}".lstrip("."): f"{path}.{b}".lstrip(".")
        for path, module in model.named_modules()
        for a, b in (vars(module).get("all_tied_weights_keys") or {}).items()
    }
    tied = {a: b for a, b in declared.items() if a in state and b in state and state[a] is state[b]}
    return {n: t for n, t in state.items() if n not in tied}, tied


def unshare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors without shared memory, copying duplicates: layers may share a router or a norm without declaring it, and
    safetensors files cannot store shared memory."""
    seen: set[tuple[int, int]] = set()
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        place = (tensor.data_ptr(), tensor.nbytes)
        found[name] = tensor.clone() if place in seen and tensor.nbytes else tensor
        seen.add(place)
    return found


def export(model: nn.Module) -> Iterator[WeightUnit]:
    """Yield the checkpoint tensors as views of the model's memory: one per unit, except that gate and up of an MLP or expert share a unit.
    Constant parameters that are not ``streamed`` are left out.

    A collective operation if parameters are sharded: each is gathered in turn, and every process receives every unit.
    """
    state = sources(model)
    layout = _layout_of(model, state)
    slices = {name: layout.slice_parameter(name, tensor) for name, tensor in state.items() if is_whole(tensor)}
    unstreamed = {name for name, tensor in state.items() if not is_streamed(tensor)}
    passing: set[str] = set()
    for members, ends in layout.units:
        unit = {}
        for view in members:
            if (source := view.source) in unstreamed:
                continue
            if source not in slices:
                slices[source] = layout.slice(source, full_values(state[source]))
                passing.add(source)
            unit[view.name] = slices[source][view.name]
        if unit:
            yield WeightUnit(unit, lasting=not passing or passing.isdisjoint([view.source for view in members]))
        for source in ends:
            if source in passing:
                del slices[source]


class Loader:
    """Copies checkpoint tensors into a model, in any order."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        state, self._tied = _without_ties(model)
        self._sources, self._layout = state, _layout_of(model, state)
        self._views = self._layout.by_name
        constant = {source for source, tensor in state.items() if is_constant(tensor)}
        self._missing = {name: None for name, view in self._views.items() if view.source not in constant}
        self._shards: dict[str, LocalShard] = {}
        self._targets: dict[str, tuple[int, dict[str, Tensor]]] = {}
        self._parts: dict[str, View] | None = None
        self._inside: dict[str, tuple[str, list[View]]] = {}

    def put(self, name: str, tensor: Tensor, copy: Copy = Tensor.copy_) -> None:
        """Copy one checkpoint tensor, or one matrix of a tensor that contains all experts. It must not require a gradient.

        Raises:
            CheckpointError: the model has no such tensor, or it has another shape.
        """
        view = self._find_view(name, tensor.shape)
        if not self._has_codes(view):
            self._write(view, tensor, copy)

    def pass_over(self, name: str) -> bool:
        """Mark one checkpoint tensor as not missing if the model stores codes instead of its values; returns whether it does."""
        view = self._find_view(name)
        return self._has_codes(view)

    def _write(self, view: View, tensor: Tensor, copy: Copy = Tensor.copy_) -> None:
        if isinstance(self._sources[view.source], DTensor):
            view.write_shard(self._shard(view.source), tensor)
        else:
            copy(self.slice(view), tensor)

    def slice(self, view: View) -> Tensor:
        """Return the part of an unsharded module tensor that ``view`` refers to, without gradient."""
        home = self._sources[view.source]
        place, known = home.data_ptr(), self._targets.get(view.source)
        if known is None or known[0] != place:
            known = self._targets[view.source] = place, self._layout.slice(view.source, home.detach())
        found = known[1].get(view.name)
        return view.of(home.detach()) if found is None else found

    def _shard(self, source: str) -> LocalShard:
        if source not in self._shards:
            self._shards[source] = local_shard(self._sources[source])
        return self._shards[source]

    def _has_codes(self, view: View) -> bool:
        """Whether only the quantised codes of the view's parameter are stored, not the parameter itself. This may change during an update."""
        if codes_of(self._sources[view.source]) is None:
            return False
        self._shards.pop(view.source, None)  # refers to the storage that the parameter had
        return True

    def locate(self, name: str) -> tuple[View, Tensor]:
        """Return the view of a tensor under one of the names that ``put`` accepts, and the module tensor that it is a view of.

        Raises:
            CheckpointError: the model has no such tensor.
        """
        name = self._stored_name(name)
        view = self._views.get(name) or self._part(name)
        if view is None:
            raise CheckpointError(f"the model has no tensor {name}; the weights belong to another model")
        return view, self._sources[view.source]

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of the module tensor of every name that ``put`` accepts."""
        self._part("")
        every = {**self._views, **(self._parts or {})}
        found = {name: self._sources[view.source].dtype for name, view in every.items()}
        return found | {name: found[stored] for name, stored in self._tied.items() if stored in found}

    def _find_view(self, name: str, shape: tuple[int, ...] | None = None) -> View:
        """Return the view of a tensor that arrived, and mark it as not missing."""
        view = self._views.get(name) or self.locate(name)[0]
        if shape is not None and shape != view.size:
            raise CheckpointError(f"{view.name} has shape {list(shape)}, the model's is {list(view.size)}")
        self._missing.pop(view.name, None)
        return view

    def _stored_name(self, name: str) -> str:
        """Return the name under which a checkpoint has a tensor that may be tied."""
        return name if name in self._views else self._tied.get(name, name)

    def _part(self, name: str) -> View | None:
        """Return the view of one expert's matrix. After the first such matrix, the joined tensor is expected matrix by matrix."""
        if self._parts is None:
            self._parts = {}
            family = Family.of(configuration(self._model).to_dict())
            for view in [v for v in self._views.values() if family.joining and is_joined(v.name, v.size)]:
                parts = [view.part(x) for x in split_experts(view.name, view.size, family)]
                self._parts |= {part.name: part for part in parts}
                self._inside |= {part.name: (view.name, parts) for part in parts}
        whole, parts = self._inside.get(name, ("", []))
        if whole in self._missing:
            del self._missing[whole]
            self._missing |= dict.fromkeys(part.name for part in parts)
        return self._parts.get(name)

    def missing(self) -> list[str]:
        """Return the names that have not arrived, in order."""
        return list(self._missing)


class _Aliasing(TorchDispatchMode):
    """Dispatch mode in which layout-changing copies return their input, so that strides still identify the source."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def _derive(model: nn.Module) -> list[View]:
    twins = {
        n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for n, t in sources(model).items()
    }
    home = {t.untyped_storage()._cdata: n for n, t in twins.items()}
    try:
        with _Aliasing():
            converted = revert_weight_conversion(model, dict(twins))  # type: ignore[arg-type]
    except RuntimeError as error:  # a step of the conversion that reorders the data
        raise CheckpointError(
            f"{type(model).__name__} converts its checkpoint's tensors to parameters by more than slicing ({first_line(error)}); "
            "the embedded backend cannot export this family yet; use another engine and trainer"
        ) from error
    found = []
    for name, tensor in converted.items():
        source = home.get(tensor.untyped_storage()._cdata)
        if source is None:
            raise CheckpointError(
                f"{type(model).__name__} keeps {name} in a layout that is not a slice of its parameters; "
                "the embedded backend cannot export this family yet; use another engine and trainer"
            )
        found.append(View(name, source, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()))
    order = {n: i for i, n in enumerate(twins)}
    return sorted(found, key=lambda v: (order[v.source], v.offset, v.name))


def group_coupled(every: list[View]) -> Iterator[list[View]]:
    """Group checkpoint tensors: gate and up of an MLP or expert together, all others alone."""
    by_name = {v.name: v for v in every}
    second = {b: a for a, b in _COUPLED.items()}
    for view in every:
        stem, _, leaf = view.name.rpartition(".")
        parent, _, last = stem.rpartition(".")
        if last in second and f"{parent}.{second[last]}.{leaf}" in by_name:
            continue  # yielded with its gate
        partner = by_name.get(f"{parent}.{_COUPLED[last]}.{leaf}") if last in _COUPLED else None
        yield [view] if partner is None else [view, partner]
