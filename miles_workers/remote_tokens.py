"""Values that training recorded for each token, which stay where the trainer computed them.

A rank returns them as one stored object for all samples of its share, and the driver passes references to the processes that save them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from miles_workers.object_ref import ObjectRef, Stored

if TYPE_CHECKING:
    from miles_core.contracts.runtime import TrainedTokens

#: ``log_probs`` and ``advantages`` of one sample.
Values = tuple[np.ndarray | None, np.ndarray | None]


class StoredTokens:
    """The values of all samples of a share in a reference, which are read once."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self._values: Sequence[Values] | None = None

    def values(self, position: int) -> Values:
        """Return the values of the sample at ``position``."""
        if self._values is None:
            self._values = self.stored.read()
        return self._values[position]

    def __reduce__(self) -> tuple[type[StoredTokens], tuple[Stored]]:
        return StoredTokens, (self.stored,)


class RemoteTokens:
    """Has the attributes of ``TrainedTokens``; reads them on access."""

    __slots__ = ("group", "position")

    def __init__(self, group: StoredTokens, position: int) -> None:
        self.group, self.position = group, position

    @property
    def log_probs(self) -> np.ndarray | None:
        return self.group.values(self.position)[0]

    @property
    def advantages(self) -> np.ndarray | None:
        return self.group.values(self.position)[1]


def pack_tokens(seen: Sequence[TrainedTokens]) -> ObjectRef:
    """Serialize the values of a share's samples."""
    return ObjectRef.dump([(tokens.log_probs, tokens.advantages) for tokens in seen])


def refer_tokens(count: int, stored: Stored) -> list[RemoteTokens]:
    """Return references to the values of ``count`` samples that ``pack_tokens`` serialized."""
    group = StoredTokens(stored)
    return [RemoteTokens(group, position) for position in range(count)]
