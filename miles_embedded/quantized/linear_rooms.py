"""Memory of native linear layers into which an encoder in the same process writes their codes."""

from __future__ import annotations

from collections.abc import Mapping

from miles_core.data.weight_unit import Encoded
from miles_core.precision.format import Parts, part_name
from miles_embedded.quantized.linear import NativeLinear


class LinearRooms:
    """The codes of layers as their format stores them, where these are views of the prepared codes.

    Args:
        layers: checkpoint name -> layer.
    """

    def __init__(self, layers: Mapping[str, NativeLinear]) -> None:
        self._layers = layers
        #: name -> prepared codes, and their views
        self._known: dict[str, tuple[Parts, Parts]] = {}

    def reserve(self, name: str) -> Parts:
        """Return the memory for the codes of a layer, stored name -> tensor; {} before it has codes, and if they are not stored as such."""
        codes = self._layers[name].codes
        if codes is None:
            return {}
        room = self._find(name)
        if room is None:
            room = _views(name, self._layers[name], codes)
            self._known[name] = codes, room
        return room

    def has(self, encoded: Encoded) -> bool:
        """Whether the parts of this weight are the memory that ``reserve`` returned, and the layer still multiplies by it."""
        room = self._find(encoded.name) if encoded.format else None
        return bool(room) and all(encoded.parts.get(part) is tensor for part, tensor in (room or {}).items())

    def drop(self, name: str) -> None:
        """Release the memory of a layer."""
        self._known.pop(name, None)

    def _find(self, name: str) -> Parts | None:
        """Return what ``reserve`` returned for the current codes of a layer."""
        codes, room = self._known.get(name, (None, None))
        return room if codes is not None and codes is self._layers[name].codes else None


def _views(name: str, layer: NativeLinear, codes: Parts) -> Parts:
    """Return the codes of a layer by stored name, if all of them are contiguous views of the prepared ones; otherwise {}."""
    stored = layer.stored() or {}
    places = {tensor.untyped_storage().data_ptr() for tensor in codes.values()}
    if not all(t.is_contiguous() and t.untyped_storage().data_ptr() in places for t in stored.values()):
        return {}
    return {part_name(name, suffix): tensor for suffix, tensor in stored.items()}
