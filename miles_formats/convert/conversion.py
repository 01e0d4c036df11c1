"""Converts a checkpoint to a number format, or back to BF16, without holding the whole model in memory.

The conversion is planned from headers alone: which tensors are read together, what they become, and the target file. ``--dry-run`` therefore
shows exactly what would happen, and errors in shapes or names are found before any weight is read. Then the jobs run, a few in parallel; each
reads its tensors, encodes them with the ``Codec`` of a weight sync, and writes the result to its final offset.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.errors import CheckpointError
from miles_formats.convert.writer import (
    SHARD_BYTES,
    Shard,
    Target,
    WorkDirectory,
    Write,
    plan_shards,
    report_disk_errors,
)

#: Bytes per copy step of an unchanged tensor.
CHUNK = 64 << 20

#: A unit of work: reads and computes, and returns the data to write.
Piece = Callable[[], list[Write]]
#: Called with the number of source bytes that were processed.
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """Tensors that are converted together and stored in one file; ``pieces`` may run in any order."""

    targets: list[Target]
    pieces: list[Piece]
    before: int


@dataclass(frozen=True)
class Item:
    """The planned change of one tensor, for ``--dry-run``. ``reason``: why it stays unchanged; empty if it changes."""

    name: str
    shape: tuple[int, ...]
    reason: str
    before: int
    after: int


@dataclass
class Conversion:
    """A planned conversion.

    Attributes:
        to: the number format, or ``bf16``.
        files: the checkpoint it reads.
        jobs: the work, in the order of the output.
        items: every tensor of the output before it is stored.
        texts: JSON files to write, config.json last.
        copies: unchanged files, name -> source path.
        notes: messages for the user.
        begin: called with the number of the first job of each file that is written, in order.
        changed_by: the plugins that change weights, with versions and options; an attempt is continued with the same ones only.
    """

    to: str
    files: CheckpointFiles
    jobs: list[Job]
    items: list[Item]
    texts: dict[str, str]
    copies: dict[str, Path]
    notes: list[str] = field(default_factory=list)
    begin: Callable[[int], None] = lambda number: None
    changed_by: str = ""

    @property
    def before(self) -> int:
        """Bytes of the source weights."""
        return sum(job.before for job in self.jobs)

    @property
    def after(self) -> int:
        """Bytes of the converted weights."""
        return sum(t.nbytes for job in self.jobs for t in job.targets)

    @property
    def changed(self) -> list[Item]:
        """The tensors that are quantised or dequantised."""
        return [item for item in self.items if not item.reason]


@dataclass(frozen=True)
class Outcome:
    """Result of ``run``. ``resumed``: bytes of source weights in files that an earlier attempt had finished."""

    directory: Path
    shards: int
    before: int
    after: int
    resumed: int
    seconds: float
    notes: tuple[str, ...]


def run(
    conversion: Conversion,
    save_dir: Path | str,
    workers: int = 2,
    shard_bytes: int = SHARD_BYTES,
    advance: Advance = lambda nbytes: None,
) -> Outcome:
    """Write the converted checkpoint to ``save_dir``.

    Args:
        conversion: planned by ``encode.to_format`` or ``decode.to_bf16``.
        save_dir: must not exist, or be empty; appears complete or not at all.
        workers: number of parallel jobs; each needs several times the memory of its tensors.
        shard_bytes: maximum bytes of a weight file.
        advance: progress callback, called from this thread.

    Raises:
        CheckpointError: the disk is full or not writable, ``save_dir`` is not empty, another conversion writes to it, or the source
            changed or was truncated while it was read; see also ``check_places``.
        MilesError: a weight contains NaN or Inf.
    """
    start = time.monotonic()
    final = check_places(conversion, save_dir)
    shards = plan_shards([job.targets for job in conversion.jobs], shard_bytes)
    resumed = 0
    with WorkDirectory(final, _fingerprint(conversion, shards)) as work, report_disk_errors(work):
        notes = [work.restarted] if work.restarted else []
        _refuse_small_disk(work, [shard for shard, _ in shards])
        with _pool(workers) as pool:
            for shard, positions in shards:
                jobs = [conversion.jobs[p] for p in positions]
                if work.is_finished(shard):
                    done = sum(job.before for job in jobs)
                    resumed += done
                    advance(done)
                else:
                    conversion.begin(positions[0])
                    with work.open(shard) as descriptor:
                        _write(pool, shard, descriptor, jobs, advance)
        work.finish([shard for shard, _ in shards], conversion.texts, conversion.copies)
    seconds = time.monotonic() - start
    return Outcome(final, len(shards), conversion.before, conversion.after, resumed, seconds, tuple(notes))


def check_places(conversion: Conversion, save_dir: Path | str) -> Path:
    """Return the directory that a conversion to ``save_dir`` writes, with links resolved.

    Raises:
        CheckpointError: the directory is inside the source checkpoint, or a file to copy is a link to a file outside of it.
    """
    source, final = conversion.files.directory.resolve(), Path(os.path.realpath(save_dir))
    if final.is_relative_to(source):
        raise CheckpointError(
            f"--save-dir {save_dir} lies inside of --model-dir {source}; choose a directory outside of it"
        )
    # A hub's cache keeps the files themselves under blobs, and links in snapshots.
    inside = (source, source.parent.parent / "blobs") if source.parent.name == "snapshots" else (source,)
    for name, file in conversion.copies.items():
        target = file.resolve()
        if not any(target.is_relative_to(place) for place in inside):
            raise CheckpointError(
                f"{conversion.files.directory / name} is a link to {target}, outside of the checkpoint; put the file itself "
                "there if it belongs to it, or remove the link"
            )
    return final


def copy_pieces(files: CheckpointFiles, name: str) -> list[Piece]:
    """Return the pieces of work that copy a tensor unchanged, a part at a time."""
    entry = files.entries[name]

    def piece(start: int) -> list[Write]:
        data = files.read_bytes(name, start, min(start + CHUNK, entry.nbytes))
        if name.endswith(".weight"):
            check_finite(name, data.view(entry.dtype))
        return [Write(name, data, start)]

    return [partial(piece, start) for start in range(0, max(entry.nbytes, 1), CHUNK)]


def check_finite(name: str, values: Tensor) -> None:
    """Raise MilesError if ``values`` contain NaN or Inf."""
    if not values.is_floating_point() or not values.numel():
        return
    if values.dtype.itemsize == 1:
        values = values.float()
    low, high = torch.aminmax(values)
    if not bool(low.isfinite() & high.isfinite()):
        raise CheckpointError(
            f"{name} holds values that are NaN or Inf; the checkpoint is damaged, or training went wrong before it was "
            "saved: copy it again, or take an earlier piece"
        )


def _write(pool: ThreadPoolExecutor, shard: Shard, descriptor: int, jobs: list[Job], advance: Advance) -> None:
    def work(piece: Piece) -> int:
        count = 0
        for write in piece():
            shard.put(descriptor, write)
            count += write.tensor.nbytes
        return count

    futures = [(pool.submit(work, piece), job.before / len(job.pieces)) for job in jobs for piece in job.pieces]
    written, told_so_far, total = 0, 0, 0.0
    try:
        for future, share in futures:
            written += future.result()
            total += share
            advance(round(total) - told_so_far)
            told_so_far = round(total)
    except BaseException:
        for future, _ in futures:
            future.cancel()
        for future, _ in futures:  # no thread may write through the descriptor once it is closed
            if not future.cancelled():
                future.exception()
        raise
    planned = sum(t.nbytes for t in shard.targets.values())
    if written != planned:
        raise RuntimeError(f"{shard.file}: {written} bytes were written, {planned} were planned")


def _pool(workers: int) -> ThreadPoolExecutor:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(torch.get_num_threads(), cores // workers))
    return ThreadPoolExecutor(workers, "convert", initializer=torch.set_num_threads, initargs=(threads,))


def _refuse_small_disk(work: WorkDirectory, shards: list[Shard]) -> None:
    needed, free = work.count_missing(shards), shutil.disk_usage(work.path).free
    if needed > free:
        raise CheckpointError(
            f"the disk of {work.final} is too small: {needed:,} bytes are to be written and {free:,} are free; "
            f"{work.left()}. Free some space, or choose another --save-dir"
        )


def _fingerprint(conversion: Conversion, shards: list[tuple[Shard, list[int]]]) -> str:
    """Changes with the source's files and with everything that will be written."""

    def lines() -> Iterator[str]:
        yield conversion.to
        yield conversion.changed_by
        yield json.dumps(conversion.texts, sort_keys=True)
        for file in conversion.files.files:
            about = file.stat()
            yield f"{file.resolve()} {about.st_size} {about.st_mtime_ns}"
        for shard, _ in shards:
            yield f"{shard.file} {hashlib.sha256(shard.header).hexdigest()}"

    return hashlib.sha256("\n".join(lines()).encode()).hexdigest()
