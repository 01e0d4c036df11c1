"""The encoder of the export stream; this base class sends every tensor unchanged. ``miles_formats.FormatCodec`` encodes with a number
format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.errors import ConfigError
from miles_core.precision.format import Format, Stored

Shape = tuple[int, ...]

#: Dtype of the model copy, which every number format quantises, regardless of the dtype in which a weight is held or stored.
COPY = torch.bfloat16

#: Returns the output tensors of a weight, stored name -> tensor, given the weight's name and its stored tensors' specification; {} to
#: allocate new tensors, and None to do so for this weight alone, because the caller has to make room first.
Room = Callable[[str, Mapping[str, Stored]], Mapping[str, Tensor] | None]


class Codec:
    """Encodes units for the engine and decodes them on the other side.

    Attributes:
        format: the number format; None sends every tensor as it is.
    """

    format: Format | None = None

    def parts(self, unit: WeightUnit) -> Iterator[WeightUnit]:
        """Yield the units whose tensors are encoded together."""
        yield unit

    def quantises(self, name: str, shape: Shape) -> bool:
        """Return whether the format applies to a tensor that is encoded under its own name."""
        return False

    def settle(self, shapes: Mapping[str, Shape], family: Any) -> None:
        """Decide for a whole model whether its joined experts are split.

        Args:
            shapes: every tensor of the model's BF16 checkpoint; empty if unknown.
            family: the family's layout of joined experts.
        """

    def experts(self, name: str, shape: Shape) -> list[Any]:
        """Return the matrices as which a joined tensor is encoded; [] for any other tensor, which keeps its name."""
        return []

    def check(self, shapes: Mapping[str, Shape]) -> list[str]:
        """Check the options that select tensors against all tensors of the checkpoint; return notes for the log."""
        return []

    def encode(self, units: Iterable[WeightUnit], room: Room | None = None) -> Iterator[Encoded]:
        """Yield encoded tensors in the order of the stream.

        Args:
            units: the export stream.
            room: returns output tensors; called for each quantised weight just before encoding, or for several if they are encoded
                together.

        Raises:
            MilesError: a weight cannot be encoded; names the tensor. Some weights after it may have been yielded by then.
        """
        for unit in units:
            yield from self.encode_unit(unit)

    def repeat(self, units: Sequence[WeightUnit], encoded: Sequence[Encoded]) -> Callable[[], Iterator[Encoded]] | None:
        """Return a function that encodes the current values of ``units`` again and yields the same objects; None if the codec does not support
        this.

        Args:
            units: lasting units of an earlier stream.
            encoded: what ``encode`` yielded for them. The function writes to these tensors before it yields the first one. They are ``lasting``
                from now on and have a ``source``.
        """
        return (lambda: iter(encoded)) if type(self) is Codec else None  # a subclass may encode in another way

    def encode_unit(self, unit: WeightUnit) -> list[Encoded]:
        """Encode one unit's tensors, in its order."""
        return [Encoded(name, {name: tensor}, lasting=unit.lasting) for name, tensor in unit.tensors.items()]

    def decode(self, encoded: Encoded) -> Tensor:
        """Decode a tensor: FP32 values, or the tensor itself if it was not quantised.

        Raises:
            ConfigError: it was quantised in another format.
        """
        if encoded.format:
            mine = f"for {self.format.name}" if self.format else "without a number format"
            raise ConfigError(
                f"{encoded.name} arrived as {encoded.format}, but this engine was built {mine}; trainer and engine "
                "must be started with the same --rollout-precision"
            )
        return encoded.parts[encoded.name]

    def decode_all(self, encoded: Sequence[Encoded], outs: Sequence[Tensor]) -> None:
        """Decode tensors of this codec to ``outs``."""
        for each, out in zip(encoded, outs, strict=True):
            out.copy_(self.decode(each))


def plain(unit: WeightUnit, name: str) -> Encoded:
    """Return a tensor of a unit as it is."""
    return Encoded(name, {name: unit.tensors[name]}, lasting=unit.lasting)
