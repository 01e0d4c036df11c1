"""A copy of the weights as they were sent at one sync, kept in host memory.

The trainer cannot read the weights of an engine in another process. With the weights of the previous sync, it can compute the
scores of an engine that still serves them (``mismatch.budget``, cause staleness).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.precision.codec import Codec


@dataclass(frozen=True)
class Snapshot:
    """The encoded weights of one version, with the codec that decodes them."""

    version: int
    units: tuple[Encoded, ...]
    codec: Codec


def snapshot(units: Iterable[WeightUnit], codec: Codec, version: int) -> Snapshot:
    """Encode an export stream with ``codec`` and copy the result to host memory."""
    copies = (
        Encoded(e.name, {n: t.detach().to("cpu", copy=True) for n, t in e.parts.items()}, e.format)
        for e in codec.encode(units)
    )
    return Snapshot(version, tuple(copies), codec)
