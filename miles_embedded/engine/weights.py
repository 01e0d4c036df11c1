"""The engine's weights: which version they are, whether they are complete, and the ways in which new ones come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from miles_core.data.unit import Encoded
from miles_core.errors import SyncError
from miles_core.sync.inbox import Inbox
from miles_embedded.model.load_units import Decode, Update

#: Sees each tensor of an update pass.
Taking = Callable[[Iterable[Encoded]], Iterator[Encoded]]


@dataclass
class _Arriving:
    """An update that comes in buckets: how many of each sender came, and whose last one did."""

    version: int
    update: Update
    counts: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


class Weights:
    """The weights of one model.

    Attributes:
        version: of the last complete update; -1 before the first.
        complete: whether the model holds one version and nothing else.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.version = -1
        self.complete = True
        self._shared: set[str] = set()
        self._inbox = Inbox()
        self._arriving: _Arriving | None = None

    def update(self, units: Iterable[Encoded], version: int, decode: Decode, share: bool = False) -> int:
        """Take a whole update at once; ``share`` as for ``Update``. Returns how many bytes were copied."""
        self.complete, self._arriving = False, None
        update = Update(self.model, decode, self._shared, share)
        update.take(units)
        copied = update.finish()
        self.version, self.complete = version, True
        return copied

    def receive(self, message: Mapping[str, Any], version: int, last: bool, taking: Taking, decode: Decode) -> bool:
        """Take one bucket. ``sender`` of a message is (rank, ranks): an update is complete with the last bucket of every rank;
        ``number`` counts a rank's buckets, and 0 begins its part anew.

        Returns:
            whether the update is complete.

        Raises:
            SyncError: a bucket is not what was sent, or did not come.
        """
        self.complete = False
        arriving, (rank, ranks), number = self._arriving, message["sender"], message["number"]
        if arriving is None or arriving.version != version or (number == 0 and rank in arriving.counts):
            arriving = _Arriving(version, Update(self.model, decode, self._shared))
        self._arriving = None  # until this one is in
        expected = arriving.counts.get(rank, 0)
        if number != expected:
            raise SyncError(
                f"bucket {number} of version {version} came to an engine that has {expected} of them: a message was lost, or the "
                "engine was started anew"
            )
        arriving.update.take(taking(self._inbox.open(message)))
        arriving.counts[rank] = number + 1
        if last:
            arriving.done.add(rank)
        if len(arriving.done) < ranks:
            self._arriving = arriving
            return False
        arriving.update.finish()
        self._inbox.finish()
        self.version, self.complete = version, True
        return True
