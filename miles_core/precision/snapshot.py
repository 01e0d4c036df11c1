"""A copy of the weights as they were sent at one sync, kept in host memory.

An engine in another process cannot be asked for the weights it holds. With the ones of the sync before at hand the trainer can
tell how the engine would score if it still served them (``observe.budget``, cause staleness).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from miles_core.data.unit import Encoded, Unit
from miles_core.precision.codec import Codec


@dataclass(frozen=True)
class Snapshot:
    """One version, encoded by the codec that is needed to read it."""

    version: int
    units: tuple[Encoded, ...]
    codec: Codec


def snapshot(units: Iterable[Unit], codec: Codec, version: int) -> Snapshot:
    """Copy an export stream as ``codec`` sends it."""
    copies = (
        Encoded(e.name, {n: t.detach().to("cpu", copy=True) for n, t in e.parts.items()}, e.format)
        for e in codec.encode(units)
    )
    return Snapshot(version, tuple(copies), codec)
