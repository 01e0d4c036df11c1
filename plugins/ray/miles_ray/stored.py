"""Blobs in Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import ray
from ray import exceptions

from miles_core.plugin import MilesError
from miles_ray.reader import RayReader
from miles_runtime import Blob, Stored


class StoredBlob:
    """One of the blobs of an object; the object is freed when the last of them is dropped.

    Args:
        blobs: reference to the object, a list of blobs.
        position: index in the list.
    """

    def __init__(self, blobs: ray.ObjectRef[list[Blob]], position: int) -> None:
        self._blobs, self._position = blobs, position

    def read(self) -> Any:
        """Fetch the object and return what the blob contains. Raises MilesError if the machine that stored it was lost."""
        try:
            return ray.get(self._blobs)[self._position].read()
        except exceptions.ObjectLostError as error:
            raise MilesError(
                "samples were lost together with the machine on which they were generated; resume the run from its last checkpoint"
            ) from error

    def open_reader(self, target: str) -> RayReader:
        """See ``RemoteStore``."""
        return RayReader(target)


class StoredBlobs(Sequence[Stored]):
    """The blobs of an object, which is not fetched."""

    def __init__(self, blobs: ray.ObjectRef[list[Blob]]) -> None:
        self._blobs = blobs

    @overload
    def __getitem__(self, position: int) -> Stored: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[Stored]: ...
    def __getitem__(self, position: Any) -> Any:
        return StoredBlob(self._blobs, position)

    def __len__(self) -> int:
        return len(ray.get(self._blobs))
