"""References in Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import ray
from ray import exceptions

from miles_core.plugin import MilesError
from miles_ray.reader import RayReader
from miles_workers import ObjectRef, Stored


class StoredRef:
    """One element of a stored list; the list is freed when the last reference to it is dropped.

    Args:
        refs: reference to the list.
        position: index in the list.
    """

    def __init__(self, refs: ray.ObjectRef[list[ObjectRef]], position: int) -> None:
        self._refs, self._position = refs, position

    def read(self) -> Any:
        """Fetch the object and return what the element contains. Raises MilesError if the machine that stored it was lost."""
        try:
            return ray.get(self._refs)[self._position].read()
        except exceptions.ObjectLostError as error:
            raise MilesError(
                "samples were lost together with the machine on which they were generated; resume the run from its last checkpoint"
            ) from error

    def open_reader(self, target: str) -> RayReader:
        """See ``RemoteStore``."""
        return RayReader(target)


class StoredRefs(Sequence[Stored]):
    """The elements of a stored list, which is not fetched."""

    def __init__(self, refs: ray.ObjectRef[list[ObjectRef]]) -> None:
        self._refs = refs

    @overload
    def __getitem__(self, position: int) -> Stored: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[Stored]: ...
    def __getitem__(self, position: Any) -> Any:
        return StoredRef(self._refs, position)

    def __len__(self) -> int:
        return len(ray.get(self._refs))
