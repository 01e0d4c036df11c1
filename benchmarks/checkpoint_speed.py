"""How fast checkpoints are written and checked, compared with the disk, and how long the event loop waits meanwhile.

The event loop is measured with core's own ``RunCheckpoints``, a learner that writes the tensors in a thread, and a schedule that holds
finished samples and prompts in use, while saving, while saving asynchronously, and while a checkpoint is checked and loaded.
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
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from measure import finish, installed, options

from miles_core.checkpoint.digest import CHUNK, FileDigest
from miles_core.checkpoint.directory import Checkpoints, check_files, seal
from miles_core.checkpoint.tensor_file import Saving, write_tensors
from miles_core.contracts.schedule import Position
from miles_core.data.column import TOKENS, Column
from miles_core.data.sample import Sample
from miles_core.observe.timer import Clock
from miles_core.rollout.queue import Prompt
from miles_core.run.checkpoints import RunCheckpoints
from miles_core.run.parts import freeze_gc

TENSOR = 256 << 20  # bytes
#: Samples that wait for training, their tokens, and prompts in use.
SAMPLES, LENGTH, PROMPTS = 1024, 8192, 8192


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


class Learner:
    """Writes the tensors in a thread, as the learner of a run in one process does."""

    def __init__(self, tensors: dict[str, torch.Tensor], files: int) -> None:
        self.tensors, self.files = tensors, files

    async def save(self, directory: Path, later: bool = False) -> None:
        directory.mkdir()
        self.saving = await asyncio.to_thread(write_checkpoint, directory, self.tensors, self.files, later)

    async def collect_digests(self) -> Mapping[str, FileDigest] | None:
        return self.saving.digests()

    async def load(self, directory: Path) -> None:
        """The trainer's own reading is not measured."""


class Schedule:
    """Holds finished samples and prompts in use."""

    def __init__(self) -> None:
        tokens = Column(TOKENS, [7] * 200)
        prompts = [Prompt("x" * 400, tokens, "1", {"row": n}, n).to_json() for n in range(PROMPTS)]
        samples = tuple(
            Sample(
                tokens=[7] * LENGTH, response="x" * LENGTH, response_length=LENGTH, rollout_log_probs=[-0.5] * LENGTH
            )
            for _ in range(SAMPLES)
        )
        self.position = Position({"prompts": {"waiting": prompts}}, samples)

    def state(self) -> Position:
        return self.position

    def load_state(self, position: Position) -> None:
        assert len(position.samples) == SAMPLES
        for prompt in position.data["prompts"]["waiting"]:
            Prompt.from_json(prompt)


async def measure_gaps(root: Path, tensors: dict[str, torch.Tensor], files: int) -> dict[str, float]:
    """Return the longest gap while saving, saving asynchronously and loading, in seconds."""
    schedule: Any = Schedule()
    policy = SimpleNamespace(name="policy", trained=1)
    part: Any = SimpleNamespace(policy=policy, learner=Learner(tensors, files))

    def make(resume_from: Path | None = None) -> RunCheckpoints:
        run: Any = SimpleNamespace(
            directory=root,
            step=1,
            policies=[policy],
            clock=Clock(),
            config=SimpleNamespace(run=SimpleNamespace(keep=1)),
            plan=SimpleNamespace(record=lambda: None),
            hooks=SimpleNamespace(on=lambda *_, **__: None),
        )
        return RunCheckpoints(run, [part], schedule, resume_from)

    async def save(later: bool) -> None:
        checkpoints = make()
        await checkpoints.save(later)
        await checkpoints.complete()

    async def resume() -> None:
        assert await make(await asyncio.to_thread(Checkpoints(root / "checkpoints").load)).resume()

    work = {
        "nothing": lambda: asyncio.sleep(2),  # gaps that the machine causes
        "save": lambda: save(False),
        "save again": lambda: save(False),
        "async save": lambda: save(True),
        "load": resume,
    }
    freeze_gc()  # as a run does; otherwise full collections visit all modules' objects, which takes tenths of a second
    return {name: await longest_gap(function) for name, function in work.items()}


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

    gaps = asyncio.run(measure_gaps(root, tensors, files))
    found |= {f"longest gap of the event loop, {name}": seconds for name, seconds in gaps.items()}
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
    seconds = {n: median(each[n] for each in rounds) for n in rounds[0]}
    size = seconds.pop("bytes")
    gaps = {n.rpartition(", ")[2]: [round(1e3 * r[n], 1) for r in rounds] for n in seconds if n.startswith("longest")}
    result = {
        "gigabytes": round(size / 1e9, 2),
        "files": given.files,
        "threads": os.cpu_count(),
        "gb_per_second": {n: round(size / s / 1e9, 2) for n, s in seconds.items() if not n.startswith("longest")},
        "save_of_disk": round(seconds["plain write"] / seconds["save"], 2),
        "check_of_disk": round(seconds["plain read"] / seconds["check"], 2),
        "held": {"samples": SAMPLES, "tokens": SAMPLES * LENGTH, "prompts": PROMPTS},
        "milliseconds_of_the_longest_gap_of_each_round": gaps,
    }
    finish("checkpoint_speed", result, given.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
