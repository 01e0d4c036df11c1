"""Clients and their models."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.plugin import MilesError
from miles_service.adapters import Adapter


@dataclass
class Session:
    """One client.

    Attributes:
        id: its id.
        seen: time of its last request.
        finished: whether it has ended.
    """

    id: str
    seen: float
    finished: bool = False


@dataclass
class Model:
    """A model that a client trains.

    Attributes:
        id: its id.
        session: the client that owns it.
        adapter: the model once it is made; None before, and after it was unloaded.
        unloaded: whether it was unloaded.
        last: the last sequence number.
    """

    id: str
    session: Session
    adapter: Adapter | None = None
    unloaded: bool = False
    last: int = 0

    def require(self) -> Adapter:
        """Return the adapter. Raises MilesError if it could not be made, or was unloaded."""
        if self.adapter is None:
            raise MilesError(f"the model {self.id} {'was unloaded' if self.unloaded else 'could not be created'}")
        return self.adapter
