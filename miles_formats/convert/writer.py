"""Writes a checkpoint's weight files piece by piece, atomically and resumably.

The contents of every file are planned before any weight is read (``plan_shards``). The header is written first, and each tensor is written to
its offset when it is ready, so memory holds only tensors in progress. Files are written to a hidden directory next to the final one, which is
renamed at the end. A journal in it records the finished files with their digests and the fingerprint of the conversion; the same command
later keeps the files with matching digests and continues.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_core.checkpoint.hf_files import INDEX, code_of
from miles_core.checkpoint.placed import is_occupied, staging_path
from miles_core.errors import CheckpointError
from miles_formats.convert.placement import lock_directory, move_into_place

#: Default maximum bytes of one weight file.
SHARD_BYTES = 5 * 10**9
JOURNAL = "conversion.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Target:
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Write:
    """Data of a target: ``tensor`` is written at byte ``start`` of the target."""

    name: str
    tensor: Tensor
    start: int = 0


class Shard:
    """One weight file with the offsets of its targets."""

    def __init__(self, file: str, targets: Iterable[Target]) -> None:
        self.file = file
        self.targets = {t.name: t for t in targets}
        self.header = self._header()
        offset = len(self.header)
        self.offsets: dict[str, int] = {}
        for target in self._order():
            self.offsets[target.name] = offset
            offset += target.nbytes
        self.nbytes = offset

    def put(self, descriptor: int, write: Write) -> None:
        """Write one piece into the open file."""
        data = memoryview(write.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if write.start + len(data) > self.targets[write.name].nbytes:
            raise ValueError(f"{write.name}: {len(data)} bytes at {write.start} are more than was planned")
        at = self.offsets[write.name] + write.start
        while data:
            count = os.pwrite(descriptor, data, at)
            data, at = data[count:], at + count

    def _order(self) -> list[Target]:
        # wide elements first, so that each tensor starts at a multiple of its element size, as readers require
        return sorted(self.targets.values(), key=lambda t: -t.dtype.itemsize)

    def _header(self) -> bytes:
        said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for target in self._order():
            span = [offset, offset + target.nbytes]
            said[target.name] = {"dtype": code_of(target.dtype), "shape": list(target.shape), "data_offsets": span}
            offset += target.nbytes
        text = json.dumps(said, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def plan_shards(groups: Iterable[list[Target]], limit: int = SHARD_BYTES) -> list[tuple[Shard, list[int]]]:
    """Distribute groups of targets over files of at most ``limit`` bytes; a group is never split and may exceed the limit alone.

    Returns each file with the indices of its groups."""
    groups = list(groups)
    parts: list[list[int]] = [[]]
    used = 0
    for position, group in enumerate(groups):
        size = sum(t.nbytes for t in group)
        if parts[-1] and used + size > limit:
            parts.append([])
            used = 0
        parts[-1].append(position)
        used += size
    names = ["model.safetensors"]
    if len(parts) > 1:
        names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    return [(Shard(name, [t for p in part for t in groups[p]]), part) for name, part in zip(names, parts, strict=True)]


class WorkDirectory:
    """The hidden directory of a conversion; it is renamed to the final directory when it is complete.

    Args:
        final: the final directory; must not exist, or be empty.
        fingerprint: fingerprint of the conversion; an unfinished conversion with the same fingerprint is resumed, another is discarded.

    Attributes:
        restarted: why an unfinished conversion was discarded; empty if none was.
    """

    def __init__(self, final: Path, fingerprint: str) -> None:
        self.final = final
        self.path = staging_path(final, "converting")
        self.fingerprint = fingerprint
        self.restarted = ""
        self._done: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> WorkDirectory:
        if is_occupied(self.final, self.path, self._journal().get("placing", ())):
            raise CheckpointError(
                f"--save-dir {self.final} already exists and is not empty; choose another directory, or delete it"
            )
        with report_disk_errors(self):
            try:
                self._lock = lock_directory(self.path)
            except BlockingIOError as error:
                raise CheckpointError(f"another conversion is writing {self.final} (in {self.path})") from error
            try:
                self._resume()
            except BaseException:
                os.close(self._lock)
                raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def is_finished(self, shard: Shard) -> bool:
        """Whether an earlier attempt finished this file and it is unchanged."""
        known = self._done.get(shard.file)
        path = self.path / shard.file
        if known is None or not path.is_file() or path.stat().st_size != shard.nbytes:
            return False
        return bool(known["sha256"] == _digest(path))

    def count_missing(self, shards: Iterable[Shard]) -> int:
        """Return the number of bytes still to write."""
        return sum(s.nbytes for s in shards if s.file not in self._done)

    @contextmanager
    def open(self, shard: Shard) -> Iterator[int]:
        """Yield a file descriptor to write the file; at exit without an error, the file is marked as finished."""
        partial = self.path / f"{shard.file}.part"
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.pwrite(descriptor, shard.header, 0)
            yield descriptor
            os.fsync(descriptor)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        finally:
            os.close(descriptor)
        digest = _digest(partial)
        partial.rename(self.path / shard.file)
        self._done[shard.file] = {"sha256": digest}
        self._write_journal()

    def finish(self, shards: list[Shard], files: Mapping[str, str], copies: Mapping[str, Path]) -> None:
        """Add the other files (name -> text, written in this order; name -> file to copy) and rename the directory."""
        for name, source in copies.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, self.path / name)
        if len(shards) > 1:
            home = {name: s.file for s in shards for name in s.targets}
            size = sum(t.nbytes for s in shards for t in s.targets.values())
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(home.items()))}
            (self.path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for name, text in files.items():
            (self.path / name).write_text(text, encoding="utf-8")
        for entry in self.path.rglob("*"):
            if entry.is_file():
                _flush(entry)
        self._write_journal(placing=[entry.name for entry in self.path.iterdir()])
        move_into_place(self.path, self.final, without=JOURNAL)
        _flush(self.final.parent)

    def _journal(self) -> dict[str, Any]:
        """Return the journal of an earlier attempt; empty without one."""
        with suppress(OSError, ValueError, TypeError):
            return dict(json.loads((self.path / JOURNAL).read_text()))
        return {}

    def _resume(self) -> None:
        said = self._journal()
        if said.get("fingerprint") == self.fingerprint:
            self._done = dict(said.get("done", {}))
            for entry in self.path.glob("*.part"):
                entry.unlink()
            return
        if any(self.path.iterdir()):
            self.restarted = (
                f"{self.path} held an unfinished conversion of other weights or with other options; starting anew"
            )
            for entry in self.path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self._write_journal()

    def _write_journal(self, placing: Iterable[str] = ()) -> None:
        """Write the journal. placing: files that are being moved to the final directory; a resumed attempt may overwrite them there."""
        temporary = self.path / f"{JOURNAL}.part"
        content = {"fingerprint": self.fingerprint, "done": self._done, "placing": list(placing)}
        temporary.write_text(json.dumps(content, indent=1))
        _flush(temporary)
        temporary.replace(self.path / JOURNAL)

    def left(self) -> str:
        """Describe what an interrupted conversion leaves behind, for messages."""
        if not self._done:
            return "nothing was finished"
        return f"{len(self._done)} finished weight files are kept in {self.path}, the same command continues from them"


@contextmanager
def report_disk_errors(work: WorkDirectory) -> Iterator[None]:
    """Convert OSError to a CheckpointError with advice and a description of what remains."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            free = shutil.disk_usage(work.path if work.path.exists() else Path.cwd()).free
            raise CheckpointError(
                f"the disk of {work.final} is full ({free:,} bytes free): the conversion stopped; {work.left()}. Free "
                "some space, or choose another --save-dir"
            ) from error
        where = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(f"{work.final} cannot be written: {error.strerror or error}{where}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
