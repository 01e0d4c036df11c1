"""Encodes the weights of a sync again: from the same memory to the same tensors. What depends on names, shapes and addresses was computed
once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_core.data.weight_unit import Encoded
from miles_core.precision.codec import COPY
from miles_core.precision.format import Format, Parts
from miles_formats.finite import Finite


class RepeatedEncoding:
    """Call it to encode again.

    Args:
        format: a format without coupled weights.
        weights: name -> weight of every quantised tensor in ``encoded``.
        encoded: an earlier result, whose codes are overwritten. Its other tensors are in the trainer's memory.
    """

    def __init__(self, format: Format, weights: Mapping[str, Tensor], encoded: Sequence[Encoded]) -> None:
        self._format, self._encoded = format, encoded
        #: weights in another dtype than that of the model copy, which are rounded to it first
        self._wide: dict[str, tuple[Tensor, Parts]] = {}
        self._groups: dict[torch.device, _Group] = {}
        for each in encoded:
            if each.format:
                weight = each.source = weights[each.name].detach()
                each.lasting = True
                parts = {part.rpartition(".")[2]: tensor for part, tensor in each.parts.items()}
                if weight.dtype == COPY:
                    group = self._groups.setdefault(weight.device, _Group())
                    group.weights[each.name] = weight
                    group.parts.append(parts)
                else:
                    self._wide[each.name] = weight, parts
        for group in self._groups.values():
            group.write = format.make_writer([*group.weights.values()], group.parts)
            group.shows = join_adjacent([parts[format.shows] for parts in group.parts]) if format.shows else []

    def __call__(self) -> Iterator[Encoded]:
        """Encode the current values and yield the same objects.

        Raises:
            MilesError: a weight holds NaN or Inf; names the tensor. Weights may have been yielded by then.
        """
        finite = Finite()
        self._write(finite)
        yield from self._encoded
        finite.look()

    @torch.no_grad()
    def _write(self, finite: Finite) -> None:
        format, shows = self._format, self._format.shows
        for group in self._groups.values():
            group.write()
            if shows:
                finite.add_shown(group.weights, torch.cat([each.flatten() for each in group.shows]))
            for name, weight in () if shows else group.weights.items():
                finite.add(name, weight, stays=True)
        for name, (weight, parts) in self._wide.items():
            copy = weight.to(COPY)
            format.quantize(copy, out=parts)
            finite.add(name, copy, shows=parts[shows] if shows else None)


@dataclass
class _Group:
    """Weights of one device: their codes, what writes these, and their parts that are not finite if a weight is not."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    parts: list[Parts] = field(default_factory=list)
    write: Callable[[], None] = lambda: None
    shows: list[Tensor] = field(default_factory=list)


def join_adjacent(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the same elements: a flat one for tensors that follow each other in one allocation."""
    found: list[list[Tensor]] = []
    end = None
    for tensor in sorted(tensors, key=Tensor.data_ptr):
        place = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        if not tensor.is_contiguous() or place != end:
            found.append([])
        found[-1].append(tensor)
        end = (place[0], place[1] + tensor.nbytes) if tensor.is_contiguous() else None
    return [run[0] if len(run) == 1 else run[0].as_strided((sum([t.numel() for t in run]),), (1,)) for run in found]
