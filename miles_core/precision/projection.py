"""Projecting weights onto a format's grid, for backends that quantise inside.

A backend with a quantiser of its own (a library inside a trainer, an engine that quantises again while it loads)
never sees our codes. If what it is given already lies on the grid of the format, its quantiser finds the same codes up
to its declared parity, and the weight it trains with, the one that is exported and the one that is served agree:
``bf16(dequantise(quantise(w)))``. Masters are not touched: the projection is of the model copy, and makes new tensors.
"""

from __future__ import annotations

from miles_core.data.unit import Unit
from miles_core.precision.codec import COPY, Codec


def project(codec: Codec, unit: Unit) -> Unit:
    """One unit of the export stream with its quantised weights on the grid, BF16 numbers in their own dtype; the others as they are.

    Raises:
        MilesError, ConfigError: as ``Codec.encode_unit``.
    """
    found = dict(unit.tensors)
    experts = {x.name: x for name, t in unit.tensors.items() for x in codec.experts(name, tuple(t.shape))}
    for encoded in codec.encode_unit(unit):
        if not encoded.format:
            continue
        value, expert = codec.decode(encoded).to(COPY), experts.get(encoded.name)
        if expert is None:
            found[encoded.name] = value.to(unit.tensors[encoded.name].dtype)
            continue
        if found[expert.source] is unit.tensors[expert.source]:
            found[expert.source] = found[expert.source].clone()
        expert.of(found[expert.source][expert.index]).copy_(value)
    return Unit(found)
