"""Encodes the weights of a sync again: from the same memory to the same tensors. What depends on names, shapes and addresses was computed
once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
        parts = {each.name: suffixes_of(each) for each in encoded if each.format}
        own = {name: weights[name].detach() for name in parts}
        for each in encoded:
            if each.format:
                each.lasting, each.source = True, own[each.name]
        #: weights in another dtype than that of the model copy, which are own to it first
        self._wide = {name: (weight, parts[name]) for name, weight in own.items() if weight.dtype != COPY}
        self._devices: dict[torch.device, list[str]] = {}
        for name, weight in own.items():
            if name not in self._wide:
                self._devices.setdefault(weight.device, []).append(name)
        self._weights, self._parts = own, parts
        self._writers = [
            format.make_writer([own[name] for name in names], [parts[name] for name in names])
            for names in self._devices.values()
        ]

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
        for write in self._writers:
            write()
        for names in self._devices.values():
            if shows:
                weights = [self._weights[name] for name in names]
                finite.add_all(names, weights, True, [self._parts[name][shows] for name in names])
            for name in () if shows else names:
                finite.add(name, self._weights[name], stays=True)
        for name, (weight, parts) in self._wide.items():
            copy = weight.to(COPY)
            format.quantize(copy, out=parts)
            finite.add(name, copy, shows=parts[shows] if shows else None)


def suffixes_of(encoded: Encoded) -> Parts:
    """Return the parts of an encoded weight by suffix."""
    return {part.rpartition(".")[2]: tensor for part, tensor in encoded.parts.items()}
