"""Shared memory of one host: files in /dev/shm, each owned by a running process."""

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

#: Linux's directory for shared memory.
DIRECTORY = Path("/dev/shm")
_NAME = "miles-weights-"
#: Shell script that reads one path per line and removes these files when the writer of the pipe has ended.
_REMOVE = 'while IFS= read -r path; do set -- "$@" "$path"; done; rm -f -- "$@"'


class NoSegmentError(SyncError):
    """Shared memory cannot be allocated; the message is a one-line reason."""


class Segment:
    """A named piece of shared memory, allocated and mapped; ``close`` frees it.

    Its file is locked while this process runs. A helper process removes the file when this process ends in any way. If the helper is killed
    too, the next run removes the unlocked file (``free_leftovers``).

    Args:
        nbytes: size in bytes.

    Raises:
        NoSegmentError: this host has no shared memory, or not enough.
    """

    def __init__(self, nbytes: int) -> None:
        directory = DIRECTORY
        if not directory.is_dir():
            raise NoSegmentError(f"there is no shared memory on this host: {directory} does not exist")
        try:
            self.path, self._file = _create_locked(directory)
        except OSError as error:
            raise NoSegmentError(f"shared memory cannot be created in {directory}: {error.strerror}") from error
        _remove_after_exit(self.path)
        try:
            os.posix_fallocate(
                self._file, 0, nbytes
            )  # without it, a missing page would kill the process with SIGBUS later
            memory = mmap.mmap(self._file, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError as error:
            self.close()
            raise NoSegmentError(
                f"{nbytes:,} bytes of shared memory cannot be allocated in {directory} ({error.strerror}); use a smaller "
                "--sync-bucket-size"
            ) from error
        self.buffer: Tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Remove the file; the memory is freed when the last process unmaps it."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def _remove_after_exit(path: Path) -> None:
    """Register a file with the helper process, which removes it when this process ends, however it ends."""
    try:
        pipe = _helper(os.getpid())
        pipe.write(f"{path}\n".encode())
        pipe.flush()
    except OSError:  # no process could be started, or the helper was killed: the next run removes the file
        pass


@cache
def _helper(process: int) -> IO[bytes]:
    """Start the helper of this process (id ``process``, the cache key) and return the pipe to it.

    The helper has its own session, so signals to this process's group do not reach it."""
    child = subprocess.Popen(
        ["/bin/sh", "-c", _REMOVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    child.returncode = 0  # it outlives this process; this suppresses the warning about a running child
    assert child.stdin is not None
    return child.stdin


def _create_locked(directory: Path) -> tuple[Path, int]:
    """Create an empty file, open and locked; returns its path and descriptor."""
    while True:
        path = directory / f"{_NAME}{secrets.token_hex(8)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:  # else another run removed it as a leftover before it was locked
            return path, file
        os.close(file)


def free_bytes() -> int:
    """Return the bytes that can still be allocated: free space in the directory, limited by the host's available memory."""
    free = shutil.disk_usage(DIRECTORY).free
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = min(free, int(line.split()[1]) << 10)
    return free


def free_leftovers() -> int:
    """Free segments whose process has ended; returns the number of freed bytes."""
    freed = 0
    for path in DIRECTORY.glob(f"{_NAME}*"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue  # owned by another user, or freed in the meantime
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            freed += os.fstat(file).st_size
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # its process is running
        finally:
            os.close(file)
    return freed
