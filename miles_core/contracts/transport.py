"""The transport contract: moving encoded weights from trainer to engine.

A transport is chosen by name (``make_transport``). Core ships the in-process copy; shared memory, device handles,
collectives and deltas are plugins. Bytes are counted there, on what travels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from miles_core.data.unit import Encoded
from miles_core.precision.format import Stored


@dataclass(frozen=True)
class SyncReport:
    """One weight sync: version, bytes that travelled, tensors, seconds; ``metrics`` are the transport's own numbers, which
    become metrics ``sync/NAME``."""

    version: int
    nbytes: int
    tensors: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Transport(ABC):
    """Delivers one version of the weights to one engine. Made on every trainer rank and run there; an engine in another
    process is told to ``receive``."""

    #: every rank needs every unit (memory handles), not one rank each (broadcast, files)
    everywhere: bool = False
    #: the engine reads the weights where the trainer has them, so that they stay awake with ``--colocate``
    shares: bool = False

    def room(self, name: str, stored: Mapping[str, Stored]) -> dict[str, Tensor] | None:
        """Where the codes of a weight that is about to be sent are to be written, stored name -> tensor; None for new tensors,
        which ``send`` then copies."""
        return None

    @abstractmethod
    async def send(self, units: Iterator[Encoded], version: int) -> SyncReport:
        """Consume ``units``, all of them also after a failure (they may be a collective); when this returns the engine serves
        ``version``. SyncError when they did not arrive: the driver then pushes again."""

    async def stage(self, units: Iterator[Encoded], version: int) -> None:
        """Bring ``version`` to the engine while it generates with the one before, for the next ``send`` to put in force; nothing
        by default, and then ``units`` is left alone. SyncError as for ``send``."""

    def unstage(self) -> None:
        """Forget what was staged: the next ``send`` sends all of it."""

    def close(self) -> None:
        """Release what it holds; nothing is sent afterwards."""
