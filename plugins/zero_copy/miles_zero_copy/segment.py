"""Shared memory of one host: files in /dev/shm that belong to a living process."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from miles_core.plugin import SyncError

#: Where Linux has shared memory.
DIRECTORY = Path("/dev/shm")
_NAME = "miles-weights-"
#: Reads paths, one a line, and removes these files when the process at the other end of the pipe is gone.
_REMOVE = 'while IFS= read -r path; do set -- "$@" "$path"; done; rm -f -- "$@"'


class NoSegmentError(SyncError):
    """There is no shared memory to be had here; one sentence."""


class Segment:
    """Shared memory with a name, reserved, mapped, and freed by ``close``.

    It is locked as long as this process lives. A helper process removes the file when this process ends in any way; where the helper is
    killed too, the next run finds a file that is not locked and removes it (``free_leftovers``).

    Args:
        nbytes: its size.

    Raises:
        NoSegmentError: there is no shared memory on this host, or not enough of it.
    """

    def __init__(self, nbytes: int) -> None:
        directory = DIRECTORY
        if not directory.is_dir():
            raise NoSegmentError(f"there is no shared memory on this host: {directory} is not there")
        try:
            self.path, self._file = _locked(directory)
        except OSError as error:
            raise NoSegmentError(f"shared memory cannot be made in {directory}: {error.strerror}") from error
        _remove_after_exit(self.path)
        try:
            os.posix_fallocate(self._file, 0, nbytes)  # a page that is not there later would end the process
            memory = mmap.mmap(self._file, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError as error:
            self.close()
            raise NoSegmentError(
                f"{nbytes:,} bytes of shared memory are not to be had in {directory} ({error.strerror}); a smaller "
                "--sync-bucket-size needs less"
            ) from error
        self.buffer: Tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Free the name; the memory goes with the last process that has it mapped."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def _remove_after_exit(path: Path) -> None:
    """Have a file removed when this process is gone, however it ends."""
    try:
        pipe = _helper(os.getpid())
        pipe.write(f"{path}\n".encode())
        pipe.flush()
    except OSError:  # no processes to be had, or the helper was killed: the next run removes the file
        pass


@cache
def _helper(process: int) -> IO[bytes]:
    """The pipe to the helper of ``process``, which is this one. Signals to this process's group do not reach the helper."""
    child = subprocess.Popen(
        ["/bin/sh", "-c", _REMOVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    child.returncode = 0  # it outlives this process: no warning that it still runs
    assert child.stdin is not None
    return child.stdin


def _locked(directory: Path) -> tuple[Path, int]:
    """A new empty file, open and locked."""
    while True:
        path = directory / f"{_NAME}{secrets.token_hex(8)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:  # else another run took it for a leftover before it was locked
            return path, file
        os.close(file)


def free_bytes() -> int:
    """Bytes that may still be taken: what is free there, or in all of the host's memory, where it lies."""
    free = shutil.disk_usage(DIRECTORY).free
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = min(free, int(line.split()[1]) << 10)
    return free


def free_leftovers() -> int:
    """Free segments whose process is gone. Returns how many bytes they held."""
    freed = 0
    for path in DIRECTORY.glob(f"{_NAME}*"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue  # somebody else's, or freed meanwhile
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            freed += os.fstat(file).st_size
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # its process lives
        finally:
            os.close(file)
    return freed
