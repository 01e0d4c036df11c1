"""Encoding the export stream with the run's number format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from miles_core.precision.format import Format
from miles_core.sync.unit import Encoded, Unit

Selector = Callable[[str, tuple[int, ...]], bool]


class Codec:
    """Encodes units for the engine and decodes them on the other side.

    Args:
        format: the rollout's number format, or None to send tensors as they are.
        select: which checkpoint tensors the format applies to.
    """

    def __init__(self, format: Format | None = None, select: Selector | None = None) -> None:
        self.format, self.select = format, select

    def encode(self, units: Iterator[Unit]) -> Iterator[Encoded]:
        """Encoded tensors in the order of the stream."""
        for unit in units:
            for name, tensor in unit.tensors.items():
                if self.format is not None and self.select is not None and self.select(name, tuple(tensor.shape)):
                    yield Encoded(name, self.format.quantize(name, tensor), self.format.name)
                else:
                    yield Encoded(name, {name: tensor})

    def decode(self, encoded: Encoded) -> Tensor:
        """The values an encoded tensor stands for."""
        if not encoded.format:
            return encoded.parts[encoded.name]
        if self.format is None or encoded.format != self.format.name:
            mine = self.format.name if self.format else "no format"
            raise ValueError(f"{encoded.name} arrived as {encoded.format}, this engine was built for {mine}")
        return self.format.dequantize(encoded.name, encoded.parts)
