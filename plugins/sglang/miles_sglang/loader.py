"""How SGLang's schedulers load a bucket of weights: this plugin's half inside them, called through SGLang's own
``--custom-weight-loader``.

A model's ``load_weights`` finds the place of every tensor by its name, which takes SGLang a tenth of a millisecond each: more than
the copy, for a model of many small experts. Where it does nothing but copy, and fill places beside with a number (the rows by which
an embedding is larger than its vocabulary), the copies of the first update are remembered, and the next bucket with the same table is
copied in one go to the same places.

The first update of a model also shows which of its parameters no update reaches (``coverage``).
"""

from __future__ import annotations

import json
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles_sglang.coverage import Coverage, tied_head

#: The name by which SGLang finds ``load``.
NAME = "miles_sglang.loader.load"
#: The entry after an update's last bucket: everything came.
COMPLETE = "complete"
#: How the scales of a quantised weight's blocks end.
_SCALES = "_scale_inv"


@dataclass(frozen=True)
class Copies:
    """What loading a bucket did.

    Attributes:
        places: in the model's parameters.
        pieces: of the bucket that went there, as dtype, size, stride and first element of the bucket.
        fills: other places, and the number that each was filled with.
        memory: where the model's parameters were.
    """

    places: Sequence[Tensor]
    pieces: Sequence[tuple[torch.dtype, torch.Size, tuple[int, ...], int]]
    fills: Sequence[tuple[Tensor, float]]
    memory: tuple[int, ...]

    def again(self, array: Tensor) -> None:
        """The same with another bucket."""
        for place, number in self.fills:  # whose memory may have been given away and come back
            place.fill_(number)
        if not self.places:
            return  # a bucket of nothing but other models' weights: a draft's and its policy's travel together
        bases = {dtype: array.view(dtype) for dtype in {piece[0] for piece in self.pieces}}
        first = {dtype: base.storage_offset() for dtype, base in bases.items()}
        found = [bases[d].as_strided(size, stride, first[d] + start) for d, size, stride, start in self.pieces]
        torch._foreach_copy_(list(self.places), found)


class Watch(TorchDispatchMode):
    """Writes down what is read of one array, the copies out of it, what is filled with a number, and whether anything else was computed.

    Args:
        array: a bucket's bytes.
    """

    def __init__(self, array: Tensor) -> None:
        super().__init__()
        self.storage = array.untyped_storage().data_ptr()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.fills: list[tuple[Tensor, float]] = []
        self.only_copies = True
        self._read: list[int] = []

    def has(self, tensor: Tensor) -> bool:
        """Whether anything was read of a tensor in the array."""
        self._read.sort()
        start = _first_byte(tensor)
        at = bisect_left(self._read, start)
        return at < len(self._read) and self._read[at] < start + tensor.nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            self._read += [_first_byte(x) for x in given if x.untyped_storage().data_ptr() == self.storage]
        if func is torch.ops.aten.copy_.default and args[1].untyped_storage().data_ptr() == self.storage:
            self.copies.append((args[0], args[1]))
        elif func in _FILLS:
            if args[0].numel():
                self.fills.append((args[0], args[1] if len(args) > 1 else 0.0))
        elif not func.is_view:
            self.only_copies = False
        return found


_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


#: model -> a bucket's table -> the copies that load it; None where loading does more than that.
_known: weakref.WeakKeyDictionary[nn.Module, dict[str, Copies | None]] = weakref.WeakKeyDictionary()
#: model -> the marks in it, until its first update is complete.
_coverage: weakref.WeakKeyDictionary[nn.Module, Coverage] = weakref.WeakKeyDictionary()
#: model -> its parameters that the first update did not reach.
_unwritten: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()


def load(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> None:
    """Load buckets into a model of SGLang.

    Args:
        named: table (``Bucket.tensors`` as JSON) -> bytes, on the model's device; ``COMPLETE`` after the last one of an update.
    """
    known = _known.setdefault(model, {})
    with torch.no_grad():
        if model not in _unwritten and model not in _coverage:
            _coverage[model] = Coverage(model)
        for table, array in named:
            if table == COMPLETE:
                _complete(model)
                continue
            memory = tuple(p.data_ptr() for p in model.parameters())
            copies = known.get(table)
            if copies is not None and copies.memory == memory:
                copies.again(array)
            else:
                known[table] = _loaded(model, table, array, memory)


def unwritten(model: nn.Module) -> list[str]:
    """Names of the model's parameters that its first complete update did not reach."""
    return _unwritten.get(model, [])


def _complete(model: nn.Module) -> None:
    """An update is over: with the first one it is known what it reached."""
    coverage = _coverage.pop(model, None)
    if coverage is not None:
        _unwritten[model] = coverage.finish(model)


def _loaded(model: Any, table: str, array: Tensor, memory: tuple[int, ...]) -> Copies | None:
    """Load a bucket by the model's own method; what that did, where it was nothing but copies."""
    tensors = _tensors(table, array)
    with Watch(array) as watch:
        model.load_weights([*tensors, *tied_head(model, tensors)])
        _load_scales(model, tensors, watch)
    if not watch.only_copies or tuple(p.data_ptr() for p in model.parameters()) != memory:
        return None
    if any(_meet(filled, place) for filled, _ in watch.fills for place, _ in watch.copies):
        return None  # which of the two came last is not remembered
    # out of host memory some models of SGLang copy in threads of their own, which are not watched
    if array.device.type == "cpu" and not all(watch.has(tensor) for _, tensor in tensors if tensor.nbytes):
        return None
    pieces = [
        (s.dtype, s.size(), s.stride(), s.storage_offset() - array.storage_offset() // s.itemsize)
        for _, s in watch.copies
    ]
    return Copies([place for place, _ in watch.copies], pieces, watch.fills, memory)


def _load_scales(model: Any, tensors: list[tuple[str, Tensor]], watch: Watch) -> None:
    """Load the scales of blocks that the model's own method passed over although it took their codes: SGLang's Llama calls them
    what the scale of a whole tensor is called, has no such parameter, and only logs that.

    Raises:
        RuntimeError: the model has no parameter for them.
    """
    taken = {name.rpartition(".")[0] for name, tensor in tensors if not name.endswith(_SCALES) and watch.has(tensor)}
    left = [
        (name, tensor)
        for name, tensor in tensors
        if name.endswith(_SCALES) and name.rpartition(".")[0] in taken and not watch.has(tensor)
    ]
    parameters = dict(model.named_parameters()) if left else {}
    for name, tensor in left:
        fused = [m for m in getattr(model, "stacked_params_mapping", ()) if m[1] in name]
        target = name.replace(fused[0][1], fused[0][0]) if fused else name
        if target not in parameters:
            raise RuntimeError(f"{type(model).__name__} took the codes of {name} and not these scales")
        parameters[target].weight_loader(parameters[target], tensor, *(m[2] for m in fused[:1]))


def _first_byte(tensor: Tensor) -> int:
    """Where a tensor begins in its storage."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may have memory in common."""
    ends = [
        t.data_ptr() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) * t.itemsize
        for t in (one, other)
    ]
    return one.data_ptr() <= ends[1] and other.data_ptr() <= ends[0]


def _tensors(table: str, array: Tensor) -> list[tuple[str, Tensor]]:
    found = []
    for name, dtype, shape, start in json.loads(table):
        kind = getattr(torch, dtype)
        nbytes = torch.Size(shape).numel() * kind.itemsize
        found.append((name, array[start : start + nbytes].view(kind).reshape(shape)))
    return found
