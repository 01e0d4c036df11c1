"""Files that carry records of routed experts from SGLang's schedulers to the run, in memory that is mounted as a file system (tmpfs).

As part of an answer, a record is pickled, encoded as base64, pickled again and written to a socket: at the end of a rollout, hundreds of records of
tens of kilobytes. Here a scheduler writes the records of all requests that finish in the same step to one file, and each answer carries a reference
of ``_REFERENCE.size`` bytes. The run reads each record with one copy and removes the file after its last record.

The name of a file is a random number in the reference, so it never leads out of the directory, and no file is mistaken for an earlier one. If the
directory is full, or the run has not read many files, records follow their references in the answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_sglang.link import SglangError

log = logging.getLogger(__name__)

#: Environment variable of SGLang's processes: the directory; unset if records are sent in answers.
VARIABLE = "MILES_SGLANG_RECORDS"
#: Where memory is mounted as a file system.
MEMORY = Path("/dev/shm")
#: Maximum files of a scheduler that the run has not read, and their bytes.
MOST_FILES, MOST_BYTES = 256, 1 << 30
#: What is logged when there is no file.
IN_ANSWERS = "records of routed experts are sent in answers, which takes longer"
#: Name of the file, offset and bytes of the record, bytes and records of the file; bytes of the file are 0 if the record follows.
_REFERENCE = struct.Struct("<8sQQQQ")
_PREFIX = "miles-records-"


class RecordWriter:
    """The scheduler's side.

    Args:
        directory: where to write the files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self._unread, self._warned = directory, dict[Path, int](), False

    def write(self, records: Sequence[NDArray[Any]]) -> list[bytes]:
        """Write contiguous records to one file and return their references."""
        sizes = [record.nbytes for record in records]
        name, total = os.urandom(8), sum(sizes)
        path = self.directory / name.hex()
        self._unread = {path: size for path, size in self._unread.items() if path.exists()}
        try:
            if len(self._unread) >= MOST_FILES or sum(self._unread.values()) + total > MOST_BYTES:
                raise OSError(f"the run has not read {len(self._unread)} files")
            with path.open("xb") as file:
                file.writelines(record.data for record in records)
        except OSError as error:
            path.unlink(missing_ok=True)
            log.log(logging.DEBUG if self._warned else logging.WARNING, "%s: %s", IN_ANSWERS, error)
            self._warned = True
            return [_REFERENCE.pack(b"", 0, record.nbytes, 0, 1) + record.tobytes() for record in records]
        self._unread[path] = total
        starts = itertools.accumulate(sizes, initial=0)
        return [
            _REFERENCE.pack(name, start, size, total, len(sizes)) for start, size in zip(starts, sizes, strict=False)
        ]


class RecordReader:
    """The run's side. Creates a directory that only this user can read; it is locked until ``close`` or the end of this process.

    Args:
        dtype: dtype of the records.
        parent: directory of the directory; default: ``MEMORY``.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(self, dtype: str, parent: Path | None = None) -> None:
        parent = parent or MEMORY
        remove_abandoned(parent)
        self.dtype = dtype
        made = Path(tempfile.mkdtemp(prefix=".miles-", dir=parent))
        self._lock = os.open(made, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # only locked directories have this name
        self.directory = made.rename(parent / made.name.replace(".miles-", _PREFIX))
        self._files: dict[str, tuple[io.FileIO, int]] = {}  # by name: the open file, and its records that were not read

    def read(self, reference: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the record [its elements] of a reference.

        Raises:
            SglangError: there is no such file, or it has another size.
        """
        try:
            name, offset, length, size, count = _REFERENCE.unpack_from(reference.data)
            if not size and len(reference) == _REFERENCE.size + length:
                return reference[_REFERENCE.size :].view(self.dtype)
            return np.frombuffer(self._take(name.hex(), offset, length, size, count), self.dtype)
        except (OSError, ValueError, struct.error) as error:
            raise SglangError(
                f"the record of routed experts of a response cannot be read from {self.directory} ({error}); generate the response again, "
                "and do not delete files there during the run"
            ) from error

    def _take(self, name: str, offset: int, length: int, size: int, count: int) -> bytes:
        # a file stays open, because opening takes longer than reading
        file, left = self._files.get(name) or (io.FileIO(self.directory / name), count)
        self._files[name] = file, left - 1
        found, held = os.pread(file.fileno(), length, offset), os.fstat(file.fileno()).st_size
        if left == 1:
            self._files.pop(name)[0].close()
            (self.directory / name).unlink(missing_ok=True)
        if held != size or len(found) != length:
            raise ValueError(f"{name} has {held} bytes instead of {size}")
        return found

    def clear(self) -> None:
        """Remove all files. Call it when no request is in flight: what is left belongs to requests that were cancelled."""
        while self._files:
            self._files.popitem()[1][0].close()
        for path in self.directory.glob("*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory."""
        self.clear()
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of this user's processes that ended without ``close``; the others are locked."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)
