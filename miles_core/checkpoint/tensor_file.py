"""Writes tensors as a safetensors file, with several threads, and hashes the bytes while they are in memory.

The format is documented at https://huggingface.co/docs/safetensors: the length of the header (8 bytes, little-endian), the header as
JSON, and the bytes of the tensors. ``Saving`` collects the digests of the files that a process writes, so that they are not read again
to seal a checkpoint. It can also copy the tensors to host memory and write them later, while training continues.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.checkpoint.digest import CHUNK, FileDigest, digest_files, flush, hash_bytes, hash_threads, join_chunks
from miles_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

#: A view of memory, and the object that owns the memory.
_Piece = tuple[memoryview, object]
#: Bytes of a system call, during which no other thread runs on its core.
_BLOCK = 1 << 20
#: Maximum number of chunks in memory that wait for the disk.
_WAITING = 32

_CURRENT: ContextVar[Saving | None] = ContextVar("saving", default=None)


class Saving:
    """Collects the digests of the files that this process writes to a checkpoint. A context manager.

    Args:
        directory: the files are named relative to it.
        later: write tensors after the context; they are copied to host memory instead.
    """

    def __init__(self, directory: Path, later: bool = False) -> None:
        self.directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving") if later else None
        self._files: dict[Path, FileDigest | Future[FileDigest]] = {}

    def __enter__(self) -> Saving:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def write(self, tensors: Mapping[str, Tensor], file: Path) -> None:
        """Write a file, or copy the tensors and write it later."""
        if self._thread is None:
            self._files[file] = _write(tensors, file)
        else:
            copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
            self._files[file] = self._thread.submit(_write, copies, file)
            for _ in range(len(copies)):  # one after the other: the event loop waits while memory is released
                self._thread.submit(copies.popitem)

    def add(self, files: Iterable[Path]) -> None:
        """Flush and hash files that were written in another way."""
        written = dict.fromkeys(files, CHUNK)
        for file in written:
            flush(file)
        self._files |= digest_files(written)

    def digests(self) -> dict[str, FileDigest] | None:
        """Return file name -> digest; None while files are being written. Raises the error of a file that cannot be written."""
        found = {}
        for file, digest in self._files.items():
            if isinstance(digest, Future):
                if not digest.done():
                    return None
                digest = digest.result()
            found[file.relative_to(self.directory).as_posix()] = digest
        return found


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors of any device to a safetensors file and flush it to the disk.

    Within the context of a ``Saving``, the digest is recorded there, and the file may be written later.

    Raises:
        CheckpointError: a tensor has an element type that the format lacks.
        OSError: the file cannot be written.
    """
    saving = _CURRENT.get()
    if saving is None:
        _write(tensors, file)
    else:
        saving.write(tensors, file)


def record_files(files: Iterable[Path]) -> None:
    """Record the digests of files of a checkpoint that this process wrote without ``write_tensors``."""
    if (saving := _CURRENT.get()) is not None:
        saving.add(files)


def _write(tensors: Mapping[str, Tensor], file: Path) -> FileDigest:
    # large elements first, so that every tensor is aligned
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header = _header(ordered)
    size = len(header) + sum(tensor.nbytes for _, tensor in ordered)
    written: list[Future[bytes]] = []
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for number, pieces in enumerate(_chunks(header, ordered)):
            if number >= _WAITING:
                written[number - _WAITING].result()
            written.append(hash_threads().submit(_write_chunk, descriptor, number * CHUNK, pieces))
        chunks = [future.result() for future in written]
        os.fsync(descriptor)
    finally:
        for (
            future
        ) in written:  # the descriptor must not be closed, and perhaps opened for another file, before they end
            future.exception()
        os.close(descriptor)
    return join_chunks(size, chunks)


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    from miles_core.checkpoint.hf_files import code_of

    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        try:
            kind = code_of(tensor.dtype)
        except KeyError:
            raise CheckpointError(
                f"the tensor {name!r} has the type {tensor.dtype}, which a safetensors file cannot hold"
            ) from None
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(header: bytes, ordered: list[tuple[str, Tensor]]) -> Iterator[list[_Piece]]:
    """Divide a file into chunks, each a list of pieces of memory. Tensors are copied from their device one after the other."""
    chunk: list[_Piece] = []
    free = CHUNK
    for data, owner in _views(header, ordered):
        while len(data):
            piece, data = data[:free], data[free:]
            chunk.append((piece, owner))
            free -= len(piece)
            if not free:
                yield chunk
                chunk, free = [], CHUNK
    if chunk:
        yield chunk


def _views(header: bytes, ordered: list[tuple[str, Tensor]]) -> Iterator[_Piece]:
    yield memoryview(header), header
    for _, tensor in ordered:
        own = tensor.detach().cpu().contiguous()
        if own.nbytes:  # not numpy(), after which a trainer could not release the memory while it sleeps
            yield memoryview((ctypes.c_ubyte * own.nbytes).from_address(own.data_ptr())).cast("B"), own


def _write_chunk(descriptor: int, start: int, pieces: list[_Piece]) -> bytes:
    first = start
    for rest, _ in pieces:
        while len(rest):
            count = os.pwrite(descriptor, rest[:_BLOCK], start)
            rest, start = rest[count:], start + count
    if hasattr(os, "posix_fadvise"):  # starts to write the pages to the disk, which takes place while others are hashed
        os.posix_fadvise(descriptor, first, start - first, os.POSIX_FADV_DONTNEED)
    return hash_bytes(*(piece for piece, _ in pieces))
