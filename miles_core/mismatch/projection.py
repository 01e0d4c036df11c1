"""Projects weights onto a format's grid, for backends that quantise internally.

A backend with its own quantiser (a library inside a trainer, an engine that quantises while loading) never receives our codes. If its
input is already on the grid of the format, its quantiser produces the same codes up to its declared parity. The trained, exported
and served weights then agree: ``bf16(dequantise(quantise(w)))``. The projection applies to the model copy and allocates new tensors;
master weights are not changed.
"""

from __future__ import annotations

from miles_core.data.weight_unit import WeightUnit
from miles_core.precision.codec import COPY, Codec


def project(codec: Codec, unit: WeightUnit) -> WeightUnit:
    """Project the quantised weights of a unit onto the grid: BF16 values in the weights' own dtype. Other tensors are unchanged.

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
    return WeightUnit(found)
