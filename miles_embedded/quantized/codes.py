"""The codes of one parameter, in place of its values.

A parameter of experts consists of hundreds of checkpoint tensors, each encoded separately. Their codes are stored together, with a first
dimension that counts them, so that one launch decodes a layer of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from miles_core.data.weight_unit import Encoded
from miles_core.precision.format import Format, Parts
from miles_embedded.model.views import View


@dataclass(frozen=True)
class Stack:
    """Checkpoint tensors of one shape that are equally spaced in their parameter.

    Attributes:
        size, stride, offset: their values in the parameter, with a first dimension that counts the tensors.
        parts: suffix -> [tensors, *stored shape]; the plain values under "" where the format leaves them alone.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    parts: Parts


@dataclass(frozen=True)
class EncodedParameter:
    """The codes of one parameter.

    Attributes:
        stacks: the checkpoint tensors that it consists of.
        format: decodes them.
        like: the parameter without storage: shape, strides, dtype and device of the values.
    """

    stacks: tuple[Stack, ...]
    format: Format
    like: Tensor

    @torch.no_grad()
    def values(self) -> Tensor:
        """Decode; see ``model.storage.Codes``."""
        like = self.like
        values = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        for stack in self.stacks:
            out = values.as_strided(stack.size, stack.stride, stack.offset)
            if "" in stack.parts:
                out.copy_(stack.parts[""])
            else:
                self.format.dequantize_stacked(stack.parts, out)
        return values

    def tensors(self) -> Iterator[Tensor]:
        """Yield codes and scales."""
        for stack in self.stacks:
            yield from stack.parts.values()


def encoded_parameter(like: Tensor, parts: Sequence[tuple[View, Encoded]], format: Format) -> EncodedParameter:
    """Make the codes of a parameter from those of its checkpoint tensors, on the device of ``like``, whose storage is freed."""
    like.untyped_storage().resize_(0)
    stacks = tuple(_stack(members, like.device) for members in _group(list(parts)))
    return EncodedParameter(stacks, format, like)


def _group(parts: list[tuple[View, Encoded]]) -> list[list[tuple[View, Encoded]]]:
    """Group tensors that can be stored together: all of them, or gates and ups if their rows alternate, otherwise each alone."""
    parts = sorted(parts, key=lambda part: part[0].offset)
    for count in (1, 2):
        groups = [parts[first::count] for first in range(count)]
        if all(_is_even(group) for group in groups):
            return groups
    return [[part] for part in parts]


def _is_even(parts: list[tuple[View, Encoded]]) -> bool:
    """Whether these tensors are stored alike, at equal distances."""
    kinds = {
        (view.size, view.stride, encoded.format, tuple((t.shape, t.dtype) for t in encoded.parts.values()))
        for view, encoded in parts
    }
    steps = {b.offset - a.offset for (a, _), (b, _) in pairwise(parts)}
    return len(kinds) == 1 and len(steps) <= 1


def _stack(parts: list[tuple[View, Encoded]], device: torch.device) -> Stack:
    first, encoded = parts[0]
    step = parts[1][0].offset - first.offset if len(parts) > 1 else 0
    stored: Parts = {}
    for name in encoded.parts:
        suffix = name.rpartition(".")[2] if encoded.format else ""
        own = [next(t for n, t in e.parts.items() if not e.format or n.rpartition(".")[2] == suffix) for _, e in parts]
        # rows are copied to the device one by one: a stack in host memory would read and write each of them once more
        stored[suffix] = torch.empty((len(own), *own[0].shape), dtype=own[0].dtype, device=device)
        for row, tensor in zip(stored[suffix], own, strict=True):
            row.copy_(tensor)
    return Stack((len(parts), *first.size), (step, *first.stride), first.offset, stored)
