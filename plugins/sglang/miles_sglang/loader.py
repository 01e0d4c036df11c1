"""How SGLang's schedulers load a bucket of weights: this plugin's half inside them, called through SGLang's own
``--custom-weight-loader``.

A model's ``load_weights`` finds the place of every tensor by its name, which takes SGLang a tenth of a millisecond each: more than
the copy, for a model of many small experts. Where it does nothing but copy, the copies of the first update are remembered, and the
next bucket with the same table is copied in one go to the same places.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

#: The name by which SGLang finds ``load``.
NAME = "miles_sglang.loader.load"


@dataclass(frozen=True)
class Copies:
    """What loading a bucket did.

    Attributes:
        places: in the model's parameters.
        pieces: of the bucket that went there, as dtype, size, stride and first element of the bucket.
        memory: where the model's parameters were.
    """

    places: Sequence[Tensor]
    pieces: Sequence[tuple[torch.dtype, torch.Size, tuple[int, ...], int]]
    memory: tuple[int, ...]

    def again(self, array: Tensor) -> None:
        """The same with another bucket."""
        if not self.places:
            return  # a bucket of nothing but other models' weights: a draft's and its policy's travel together
        bases = {dtype: array.view(dtype) for dtype in {piece[0] for piece in self.pieces}}
        first = {dtype: base.storage_offset() for dtype, base in bases.items()}
        found = [bases[d].as_strided(size, stride, first[d] + start) for d, size, stride, start in self.pieces]
        torch._foreach_copy_(list(self.places), found)


class Watch(TorchDispatchMode):
    """Writes down the copies out of one array, and whether anything else was computed.

    Args:
        array: a bucket's bytes.
    """

    def __init__(self, array: Tensor) -> None:
        super().__init__()
        self.storage = array.untyped_storage().data_ptr()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.only_copies = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[1].untyped_storage().data_ptr() == self.storage:
            self.copies.append((args[0], args[1]))
        elif not func.is_view:
            self.only_copies = False
        return found


#: model -> a bucket's table -> the copies that load it; None where loading does more than that.
_known: weakref.WeakKeyDictionary[nn.Module, dict[str, Copies | None]] = weakref.WeakKeyDictionary()


def load(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> None:
    """Load buckets into a model of SGLang.

    Args:
        named: table (``Bucket.tensors`` as JSON) -> bytes, on the model's device.
    """
    known = _known.setdefault(model, {})
    with torch.no_grad():
        for table, array in named:
            memory = tuple(p.data_ptr() for p in model.parameters())
            copies = known.get(table)
            if copies is not None and copies.memory == memory:
                copies.again(array)
            elif copies is not None or table not in known:
                known[table] = _loaded(model, table, array, memory)
            else:
                model.load_weights(_tensors(table, array))  # type: ignore[operator]


def _loaded(model: Any, table: str, array: Tensor, memory: tuple[int, ...]) -> Copies | None:
    """Load a bucket by the model's own method; what that did, where it was nothing but copies."""
    with Watch(array) as watch:
        model.load_weights(_tensors(table, array))
    if not watch.only_copies or tuple(p.data_ptr() for p in model.parameters()) != memory:
        return None
    pieces = [
        (s.dtype, s.size(), s.stride(), s.storage_offset() - array.storage_offset() // s.itemsize)
        for _, s in watch.copies
    ]
    return Copies([place for place, _ in watch.copies], pieces, memory)


def _tensors(table: str, array: Tensor) -> list[tuple[str, Tensor]]:
    found = []
    for name, dtype, shape, start in json.loads(table):
        kind = getattr(torch, dtype)
        nbytes = torch.Size(shape).numel() * kind.itemsize
        found.append((name, array[start : start + nbytes].view(kind).reshape(shape)))
    return found
