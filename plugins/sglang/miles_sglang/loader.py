"""Loads buckets of weights inside SGLang's schedulers. SGLang calls ``load`` through its ``--custom-weight-loader``.

A model's ``load_weights`` finds the destination of every tensor by name, which takes about 0.1 ms per tensor: longer than the copy for
models with many small experts. If loading only copies tensors and fills regions with a constant (such as the padding rows of an
embedding), the copies of the first update are recorded. Later buckets with the same table replay them in one batched copy.

The first update also shows which parameters updates do not write (``coverage``).
"""

from __future__ import annotations

import json
import sys
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles_sglang import repacking
from miles_sglang.coverage import ignored_parameters, tied_head
from miles_workers.transport import DRAFT, Coverage

#: Import path of ``load`` for SGLang.
NAME = "miles_sglang.loader.load"
#: Name of the marker entry that follows the last bucket of an update.
COMPLETE = "complete"
#: Attribute that marks such a draft of SGLang.
SEPARATE = "miles_separate_draft"
#: Buffer of a copy of a router's weight in FP32.
_WIDE_COPY = "_weight_fp32"
#: Name suffix of the block scales of a quantised weight.
_SCALES = "_scale_inv"


@dataclass(frozen=True)
class Copies:
    """The recorded copies that load a bucket.

    Attributes:
        places: destinations, views of the model's parameters.
        pieces: the source of each destination in the bucket: dtype, size, stride and offset in elements.
        fills: destinations that were filled with a constant, and the constant.
        memory: data pointers of the model's parameters at recording time.
    """

    places: Sequence[Tensor]
    pieces: Sequence[tuple[torch.dtype, torch.Size, tuple[int, ...], int]]
    fills: Sequence[tuple[Tensor, float]]
    memory: tuple[int, ...]

    def replay(self, array: Tensor) -> None:
        """Load another bucket with the same table."""
        for (
            place,
            number,
        ) in self.fills:  # repeated because the memory saver may have released and reallocated this memory
            place.fill_(number)
        if not self.places:
            return  # the bucket has only tensors of the other model: buckets mix weights of the policy and of its draft
        bases = {dtype: array.view(dtype) for dtype in {piece[0] for piece in self.pieces}}
        first = {dtype: base.storage_offset() for dtype, base in bases.items()}
        found = [bases[d].as_strided(size, stride, first[d] + start) for d, size, stride, start in self.pieces]
        torch._foreach_copy_(list(self.places), found)


class Watch(TorchDispatchMode):
    """Records reads of one array, copies out of it, fills with a constant, and whether any other operation ran.

    Args:
        array: the bytes of a bucket.
    """

    def __init__(self, array: Tensor) -> None:
        super().__init__()
        self.storage = array.untyped_storage().data_ptr()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.fills: list[tuple[Tensor, float]] = []
        self.only_copies = True
        self._read: list[int] = []

    def has(self, tensor: Tensor) -> bool:
        """Whether any part of a tensor in the array was read."""
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


#: model -> table of a bucket -> the copies that load it; None if loading does more than copying.
_known: weakref.WeakKeyDictionary[nn.Module, dict[str, Copies | None]] = weakref.WeakKeyDictionary()
#: model -> its marks, until its first update is complete.
_coverage: weakref.WeakKeyDictionary[nn.Module, Coverage] = weakref.WeakKeyDictionary()
#: model -> names of parameters that the first update did not write.
_unwritten: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()


def load(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> None:
    """Load buckets into a model of SGLang.

    Args:
        model: SGLang's model.
        named: (table, bytes) pairs: ``Bucket.tensors`` as JSON, and the bytes on the model's device; an entry named ``COMPLETE``
            follows the last bucket of an update.
    """
    known = _known.setdefault(model, {})
    with torch.no_grad():
        if model not in _unwritten and model not in _coverage:
            _coverage[model] = Coverage(model)
        repacking.open_layers(model)
        for table, array in named:
            if table == COMPLETE:
                _complete(model)
                continue
            memory = tuple(p.data_ptr() for p in model.parameters())
            copies = known.get(table)
            if copies is not None and copies.memory == memory:
                copies.replay(array)
            else:
                known[table] = _load_and_record(model, table, array, memory)


def unwritten_parameters(model: nn.Module) -> list[str]:
    """Return the names of parameters that the model's first complete update did not write."""
    return _unwritten.get(model, [])


def _complete(model: nn.Module) -> None:
    """End an update; after the first one, store the names of unwritten parameters."""
    repacking.close_layers(model)
    _refresh_copies(model)
    _forget_features()
    coverage = _coverage.pop(model, None)
    if coverage is not None:
        _unwritten[model] = coverage.finish(model, ignored_parameters(model))


def _refresh_copies(model: nn.Module) -> None:
    """Update the copies of weights that modules made when they first computed, in place because CUDA graphs read them.

    SGLang's routers of the GLM-4.5 family multiply with a copy in FP32, which SGLang 0.5.17 never updates.
    """
    module: Any
    for module in model.modules():
        if (copied := module._buffers.get(_WIDE_COPY)) is not None:
            copied.copy_(module.weight)


def _forget_features() -> None:
    """Drop the features of images that SGLang keeps between requests: it computed them with the weights before the update."""
    module: Any = sys.modules.get("sglang.srt.managers.mm_utils")
    if (cache := getattr(module, "embedding_cache", None)) is not None:
        cache.clear()


def _load_and_record(model: Any, table: str, array: Tensor, memory: tuple[int, ...]) -> Copies | None:
    """Load a bucket with the model's ``load_weights``. Returns the recorded copies; None if they cannot be replayed."""
    tensors = _select(model, _unpack(table, array))
    with Watch(array) as watch:
        if tensors:
            model.load_weights([*tensors, *tied_head(model, tensors)])
        _load_scales(model, tensors, watch)
    if repacking.packs(model):
        return None
    if not watch.only_copies or tuple(p.data_ptr() for p in model.parameters()) != memory:
        return None
    if any(_overlap(filled, place) for filled, _ in watch.fills for place, _ in watch.copies):
        return None  # the order of overlapping fills and copies is not recorded
    # some models of SGLang copy host tensors in other threads, which the dispatch mode does not see
    if array.device.type == "cpu" and not all(watch.has(tensor) for _, tensor in tensors if tensor.nbytes):
        return None
    pieces = [
        (s.dtype, s.size(), s.stride(), s.storage_offset() - array.storage_offset() // s.itemsize)
        for _, s in watch.copies
    ]
    return Copies([place for place, _ in watch.copies], pieces, watch.fills, memory)


def _select(model: Any, tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a model: those of a draft model of its own have a prefix, which its checkpoint does not have."""
    if getattr(model, SEPARATE, False):
        return [(name.removeprefix(DRAFT), tensor) for name, tensor in tensors if name.startswith(DRAFT)]
    return [(name, tensor) for name, tensor in tensors if not name.startswith(DRAFT)]


def _load_scales(model: Any, tensors: list[tuple[str, Tensor]], watch: Watch) -> None:
    """Load block scales that ``load_weights`` skipped although it loaded their codes.

    SGLang's Llama maps them to the name of a per-tensor scale, for which it has no parameter, and only logs that.

    Raises:
        RuntimeError: the model has no parameter for the scales.
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
            raise RuntimeError(
                f"{type(model).__name__} loaded the codes of {name} but has no parameter for these scales"
            )
        parameters[target].weight_loader(parameters[target], tensor, *(m[2] for m in fused[:1]))


def _first_byte(tensor: Tensor) -> int:
    """Return the byte offset of a tensor in its storage."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the memory ranges of two tensors overlap."""
    ends = [
        t.data_ptr() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) * t.itemsize
        for t in (one, other)
    ]
    return one.data_ptr() <= ends[1] and other.data_ptr() <= ends[0]


def _unpack(table: str, array: Tensor) -> list[tuple[str, Tensor]]:
    found = []
    for name, dtype, shape, start in json.loads(table):
        kind = getattr(torch, dtype)
        nbytes = torch.Size(shape).numel() * kind.itemsize
        found.append((name, array[start : start + nbytes].view(kind).reshape(shape)))
    return found
