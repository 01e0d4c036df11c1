"""Spills routing records beyond ``--r3-buffer-size`` to compact files in the run directory.

A spilled record replaces its array: it has a length, and numpy converts it to the array when the batch is built. Its file exists as long as
the record. A pickled record (sent to another process or stored in a checkpoint) contains the bytes and needs no file.
"""

from __future__ import annotations

import itertools
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.plugin import DataError
from miles_r3.codec import decode, encode


class SpilledRoutes:
    """A record [tokens, layers, k] in a file, or as bytes after unpickling."""

    def __init__(self, length: int, payload: bytes | None = None, path: Path | None = None) -> None:
        self._length, self._payload, self._path = length, payload, path
        if path is not None:
            weakref.finalize(self, _remove, path)

    def __len__(self) -> int:
        return self._length

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        routes = decode(self.payload)
        return routes if dtype is None else routes.astype(dtype, copy=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return SpilledRoutes, (self._length, self.payload)

    @property
    def payload(self) -> bytes:
        """Return the compact bytes. Raises DataError if the file is missing or cannot be read."""
        if self._payload is not None:
            return self._payload
        assert self._path is not None
        try:
            return self._path.read_bytes()
        except OSError as error:
            raise DataError(
                f"the routing record {self._path} cannot be read ({error.strerror}); do not delete files in the run directory during "
                "the run, or leave --r3-buffer-size out to keep records in memory"
            ) from error


class RouteBuffer:
    """Decides which records stay in memory.

    Args:
        directory: directory of spilled records; created, or emptied of an earlier run's files, with the first one.
        size: maximum number of records in memory; None keeps all in memory.
    """

    def __init__(self, directory: Path, size: int | None) -> None:
        self.directory, self.size = directory, size
        self.spilled = self.live = 0
        self._names = itertools.count()

    def keep(self, routes: NDArray[np.integer[Any]], experts: int) -> NDArray[np.integer[Any]] | SpilledRoutes:
        """Return ``routes`` itself, or a spilled record that replaces it."""
        if self.size is None:
            return routes
        if self.live < self.size:
            self.live += 1
            weakref.finalize(routes, self._release)
            return routes
        if not self.spilled:
            self._open()
        path = self.directory / f"{os.getpid()}-{next(self._names)}.routes"
        path.write_bytes(encode(routes, experts))
        self.spilled += 1
        return SpilledRoutes(len(routes), path=path)

    def _release(self) -> None:
        self.live -= 1

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob("*.routes"):
            left.unlink()


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
