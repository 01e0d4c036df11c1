"""How fast checkpoints are written and checked, compared with the disk, and how long the event loop waits meanwhile.

The disk's bandwidth is that of one file of the same size, written in the same chunks and flushed, or read with an empty page cache where
the system allows it. Run it on the disk in question: ``python benchmarks/checkpoint_speed.py --directory DIR --gigabytes 8 --save``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import finish, installed, options

from miles_core.checkpoint.digest import CHUNK
from miles_core.checkpoint.directory import Checkpoints, check_files, seal
from miles_core.checkpoint.tensor_file import Saving, write_tensors

TENSOR = 256 << 20  # bytes


def forget(directory: Path) -> None:
    """Drop the pages of all files from the page cache."""
    for file in directory.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def write_plain(file: Path, data: memoryview, count: int) -> None:
    """Write ``data`` ``count`` times and flush it."""
    with file.open("wb", buffering=0) as out:
        for _ in range(count):
            for start in range(0, len(data), CHUNK):
                out.write(data[start : start + CHUNK])
        os.fsync(out.fileno())


def read_plain(file: Path) -> None:
    """Read a file."""
    with file.open("rb", buffering=0) as source:
        block = bytearray(CHUNK)
        while source.readinto(block):
            pass


def write_checkpoint(work: Path, tensors: dict[str, torch.Tensor], files: int, later: bool = False) -> Saving:
    """Write the tensors to ``files`` files, as the ranks of a trainer do."""
    names = list(tensors)
    with Saving(work, later) as saving:
        for number in range(files):
            own = {name: tensors[name] for name in names[number::files]}
            write_tensors(own, work / f"model.{number}-of-{files}.safetensors")
    return saving


async def longest_gap(work: Callable[[], Awaitable[Any]]) -> float:
    """Return the longest time in seconds for which a task could not run while ``work`` ran."""
    gaps = [0.0]

    async def watch() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last - 0.001)
            last = now

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    await work()
    watching.cancel()
    return max(gaps)


def measure(root: Path, gigabytes: float, files: int) -> dict[str, float]:
    """One round: seconds of each kind of work."""
    count = max(files, round(gigabytes * (1 << 30) / TENSOR))
    tensor = torch.randint(0, 2**31, (TENSOR // 4,), dtype=torch.int32)
    tensors = {f"layer.{n}": tensor for n in range(count)}
    found = {}

    def timed(name: str, work: Callable[[], Any]) -> None:
        start = time.perf_counter()
        work()
        found[name] = time.perf_counter() - start

    timed("plain write", lambda: write_plain(root / "plain", memoryview(tensor.numpy()).cast("B"), count))
    forget(root)
    timed("plain read", lambda: read_plain(root / "plain"))
    (root / "plain").unlink()
    checkpoints = Checkpoints(root / "checkpoints")

    def save() -> None:
        with checkpoints.save(1) as work:
            seal(work, 1, None, write_checkpoint(work, tensors, files).digests())

    timed("save", save)
    forget(root)
    timed("check", lambda: check_files(checkpoints.path(1)))
    shutil.rmtree(root / "checkpoints")

    async def save_in_loop() -> None:
        with checkpoints.save(1) as work:
            saving = await asyncio.to_thread(write_checkpoint, work, tensors, files)
            await asyncio.to_thread(seal, work, 1, None, saving.digests())

    found["longest gap of the event loop"] = asyncio.run(longest_gap(save_in_loop))
    shutil.rmtree(root / "checkpoints")
    found["bytes"] = float(count * TENSOR)
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--files", type=int, default=4, help="files of the checkpoint, as of so many ranks")
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    rounds = []
    for _ in range(given.repetitions):
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            rounds.append(measure(Path(directory), given.gigabytes, given.files))
            print(rounds[-1], file=sys.stderr, flush=True)
    seconds = {name: median(each[name] for each in rounds) for name in rounds[0]}
    size = seconds.pop("bytes")
    result = {
        "gigabytes": round(size / 1e9, 2),
        "files": given.files,
        "threads": os.cpu_count(),
        "gb_per_second": {n: round(size / s / 1e9, 2) for n, s in seconds.items() if not n.startswith("longest")},
        "save_of_disk": round(seconds["plain write"] / seconds["save"], 2),
        "check_of_disk": round(seconds["plain read"] / seconds["check"], 2),
        "milliseconds_of_the_longest_gap": round(1e3 * seconds["longest gap of the event loop"], 1),
    }
    finish("checkpoint_speed", result, given.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
