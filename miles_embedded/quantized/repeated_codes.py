"""The codes of one weight update, which the next updates store in the same places."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.data.weight_unit import Encoded
from miles_embedded.quantized.activation import RoundedInputs


class RepeatedCodes:
    """Stores the codes of encoded units whose memory lasts, see ``model.load_units.StoredCodes``.

    Args:
        inputs: the native layers, which have the codes of ``units``.
        units: the units of a complete update.
    """

    def __init__(self, inputs: RoundedInputs, units: Iterable[Encoded]) -> None:
        self._inputs = inputs
        own = [unit for unit in units if unit.name in inputs.layers or unit.name in inputs.experts]
        #: those that the encoder did not write in place
        self._copied = [unit for unit in own if not inputs.has(unit)]
        self._places = [(layer, layer.codes) for layer in inputs.layers.values()]
        self._experts = [(experts, experts.codes) for experts in dict.fromkeys(inputs.experts.values())]

    def is_current(self) -> bool:
        """Whether every layer keeps its codes in the same memory as then, and has all of them."""
        return all(layer.codes is codes for layer, codes in self._places) and all(
            experts.codes is codes and experts.ready for experts, codes in self._experts
        )

    def take(self) -> None:
        """Store the current codes."""
        for unit in self._copied:
            self._inputs.take(unit)
