"""The transport contract: moves encoded weights from trainer to engine.

A transport is selected by name (``make_transport``). Core includes the in-process copy; shared memory, device handles,
collectives and deltas are plugins. Each transport counts the bytes that it transfers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from miles_core.data.weight_unit import Encoded
from miles_core.precision.format import Stored


@dataclass(frozen=True)
class SyncReport:
    """The result of one weight sync.

    Attributes:
        version: version that the engine now serves.
        nbytes: number of bytes transferred.
        tensors: number of tensors.
        seconds: duration.
        metrics: additional measurements of the transport, recorded as ``sync/NAME``.
    """

    version: int
    nbytes: int
    tensors: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Transport(ABC):
    """Delivers versions of the weights to one engine. Every trainer rank builds one, and every rank that sends (``World.sends``) runs it;
    for an engine in another process, it calls ``receive``."""

    #: whether ``stage`` transfers weights; it then consumes all units
    staging: bool = False
    #: whether the engine reads the weights from the trainer's memory; with ``--colocate`` they then stay awake
    shares: bool = False
    #: whether the engine has copied every unit when ``send`` returns, and ``reserve`` returns the same tensors for a weight as long as the engine
    #: keeps them. Later syncs may then send the same encoded objects with new values.
    repeats: bool = False

    def reserve(self, name: str, stored: Mapping[str, Stored]) -> Mapping[str, Tensor] | None:
        """Return tensors into which the encoder writes the next weight to send, stored name -> tensor.

        {} makes the encoder allocate new tensors, which ``send`` copies. None does so for this weight alone: ``send`` then receives all
        weights up to this one before the next call.
        """
        return {}

    @abstractmethod
    async def send(self, units: Iterator[Encoded], version: int) -> SyncReport:
        """Deliver ``units`` to the engine, which serves ``version`` when this returns.

        Must consume all ``units`` even after a failure, because producing them may be a collective. Raises SyncError if the weights
        did not arrive; the driver then pushes again.
        """

    async def stage(self, units: Iterator[Encoded], version: int) -> None:
        """Transfer ``version`` while the engine still generates with the previous version; the next ``send`` activates it.

        The default does nothing; a transport that overrides it sets ``staging``. Raises SyncError if the weights did not arrive.
        """

    def unstage(self) -> None:
        """Discard staged weights; the next ``send`` transfers everything."""

    def close(self) -> None:
        """Release all resources. Nothing is sent afterwards."""
