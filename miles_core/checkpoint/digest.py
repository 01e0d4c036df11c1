"""Digests of checkpoint files, computed by several threads.

A file is divided into chunks. Its digest is the BLAKE2b hash (RFC 7693, 32 bytes) of the concatenated hashes of its chunks, so chunks can
be hashed in any order, also while the file is being written. Files of older checkpoints have a plain hash of their contents
(``chunk`` 0).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

#: Bytes of a chunk.
CHUNK = 32 << 20
#: Bytes that are read at a time.
_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileDigest:
    """Size and digest of a file.

    Attributes:
        size: number of bytes.
        blake2b: the digest, hexadecimal.
        chunk: bytes of a chunk; 0 for a plain hash of the contents.
    """

    size: int
    blake2b: str
    chunk: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileDigest:
        """Inverse of ``to_json``. Raises KeyError, TypeError or ValueError for malformed data."""
        return cls(int(data["size"]), str(data["blake2b"]), int(data.get("chunk", 0)))

    def to_json(self) -> dict[str, Any]:
        """Return this digest as a manifest stores it: a dict with one key per attribute."""
        return asdict(self)


@cache
def hash_threads() -> ThreadPoolExecutor:
    """Return the threads that read, hash and write chunks."""
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="digest")


def hash_bytes(*parts: Any) -> bytes:
    """Return the BLAKE2b hash of the concatenated ``parts``, which are bytes-like. Releases the interpreter lock."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(part)
    return digest.digest()


def join_chunks(size: int, chunks: Iterable[bytes]) -> FileDigest:
    """Return the digest of a file from the hashes of its chunks of ``CHUNK`` bytes, in order."""
    return FileDigest(size, hash_bytes(*chunks).hex(), CHUNK)


def digest_files(files: Mapping[Path, int]) -> dict[Path, FileDigest]:
    """Compute the digests of files; chunks of all files are hashed concurrently.

    Args:
        files: path -> bytes of a chunk, 0 for a plain hash.

    Raises:
        OSError: a file cannot be read.
    """
    sizes = {file: file.stat().st_size for file in files}
    hashes = {
        file: [
            hash_threads().submit(_hash_range, file, start, chunk or sizes[file])
            for start in range(0, max(sizes[file], 1), chunk or max(sizes[file], 1))
        ]
        for file, chunk in files.items()
    }
    found = {}
    for file, chunk in files.items():
        parts = [future.result() for future in hashes[file]]
        found[file] = FileDigest(sizes[file], (hash_bytes(*parts) if chunk else parts[0]).hex(), chunk)
    return found


def _hash_range(file: Path, start: int, length: int) -> bytes:
    digest, block = hashlib.blake2b(digest_size=32), memoryview(bytearray(min(_BLOCK, length)))
    with file.open("rb", buffering=0) as source:
        source.seek(start)
        while length and (count := source.readinto(block[:length])):
            digest.update(block[:count])
            length -= count
    return digest.digest()


def flush(file: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
