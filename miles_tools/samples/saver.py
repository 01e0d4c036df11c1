"""Saves the samples of each step. Large steps are encoded by other processes while the run continues; samples that stay where they were
produced are read there (``writers``)."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.contracts.runtime import TrainedTokens
from miles_core.data.sample import Sample
from miles_core.errors import MilesError
from miles_core.redact import secrets
from miles_tools.samples.files import DIRECTORY, FILE, KINDS, MEDIA, read_file, rollout_files
from miles_tools.samples.rows import JoinedRows, Pieces, Row, forget_media, pack, response_of, store_media
from miles_tools.samples.writers import Entry, Writers, make_entries
from miles_workers.remote_sample import is_reference

if TYPE_CHECKING:
    from miles_core.contracts.run import Run

log = logging.getLogger(__name__)

#: Steps of at most this many tokens are written by the driver itself, which takes less time than a process takes to start.
SMALL = 1 << 12
#: Maximum number of writer processes. One encodes about 300,000 tokens per second.
WRITERS = 8
#: Number of the newest files of each kind that a resumed run reads: those that a power loss may have damaged.
CHECKED = 4


class SampleSaver:
    """Writes the samples of each step to a separate file, and deletes the oldest files beyond a total size.

    A file is written under a temporary name and then renamed, so a killed process never leaves a partial file. The next step is
    accepted when the file of the previous one is complete, so a killed run lacks at most one file.

    Args:
        run_dir: the run directory; no other run writes there.
        tokenizer: converts tokens to text.
        limit: maximum total size of all files in bytes; None saves nothing, and only deletes files of repeated steps.
        writers: maximum number of writer processes.
    """

    def __init__(self, run_dir: Path, tokenizer: Any, limit: int | None, writers: int = WRITERS) -> None:
        self.run_dir, self.limit = run_dir, limit
        self._existed = self.run_dir.is_dir()
        self._pieces = Pieces(tokenizer)
        self._sizes: dict[tuple[int, str], int] = {}
        self._limit_logged = self._checked = False
        self._writers = Writers(self._pieces, writers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._pending: Future[None] | None = None
        self._turn = asyncio.Lock()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: this sink receives samples only."""

    async def write_samples(
        self, kind: str, step: int, samples: Iterable[tuple[Sample, TrainedTokens | None, str]]
    ) -> None:
        """Write the samples of a step, each with the values recorded in training and the name of its evaluation set.

        Returns when the file of the previous step is complete.

        Raises:
            MilesError: a file cannot be written (a full disk), or a writer process has ended.
        """
        if self.limit is None:
            return
        async with self._turn:
            await self._complete()
            listed = [*samples]
            if shown := [sample for sample, _, _ in listed if not is_reference(sample) and sample.media]:
                self._store_media(shown, step)
            entries = await make_entries(step, listed)
            here = [entry for entry, _ in entries if isinstance(entry, JoinedRows)]
            if len(here) == len(entries) and sum(size for _, size in entries) <= SMALL:
                # a thread would take the interpreter lock from the next step for longer
                rows = [row for entry in here for row in entry.split()]
                for row in rows:
                    self._pieces.add(response_of(row))
                self.save(kind, step, rows)
            else:
                self._writers.texts.loop = asyncio.get_running_loop()
                self._pending = self._thread.submit(self._save_elsewhere, kind, step, entries)

    def _store_media(self, samples: Sequence[Sample], step: int) -> None:
        try:
            store_media(self.run_dir / DIRECTORY / MEDIA, samples)
        except OSError as error:
            where = self.run_dir / DIRECTORY / MEDIA
            raise MilesError(
                f"cannot write the images of step {step} to {where}: {error.strerror}; {_advise(error)}"
            ) from error

    def save(self, kind: str, step: int, rows: Sequence[Row]) -> None:
        """Write one file in this process.

        Raises:
            MilesError: as for ``write_samples``.
        """
        packed = pack(rows, self._pieces, secrets(os.environ))
        self._replace(kind, step, lambda part: part.write_bytes(packed))

    def _save_elsewhere(self, kind: str, step: int, entries: list[tuple[Entry, int]]) -> None:
        self._replace(kind, step, lambda part: self._writers.write(part, step, entries))

    def _replace(self, kind: str, step: int, write: Callable[[Path], object]) -> None:
        """Replace a file by what ``write`` writes."""
        target = self.run_dir / FILE.format(kind, step)
        part = target.with_suffix(".part")
        try:
            # do not continue on the local disk below the mount point of a lost file system
            if self._existed and not self.run_dir.is_dir():
                raise FileNotFoundError(errno.ENOENT, "the run's directory is gone (a lost file system?)")
            target.parent.mkdir(parents=True, exist_ok=True)
            write(part)
            size = part.stat().st_size
            part.replace(target)
        except OSError as error:
            raise MilesError(
                f"cannot write the samples of step {step} to {target}: {error.strerror}; {_advise(error)}"
            ) from error
        self._sizes[step, kind] = size
        self._forget_oldest(step)

    def roll_back(self, step: int) -> None:
        """Delete the samples of all steps after ``step``. The first call also removes partial files, and warns of damaged ones."""
        if self._pending is not None:
            self._writers.texts.wait_for(self._pending)
        self._sizes = {}
        for kind in KINDS:
            for number, path in rollout_files(self.run_dir, kind).items():
                if number > step:
                    path.unlink()
                else:
                    self._sizes[number, kind] = path.stat().st_size
        if not self._checked:
            self._checked = True
            self._check()

    def close(self) -> None:
        """Wait until the last file is complete and end the writer processes.

        Raises:
            MilesError: the last file cannot be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._writers.texts.wait_for(pending)
        self._thread.shutdown()
        self._writers.close()
        if pending is not None:
            pending.result()

    async def _complete(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            await asyncio.shield(asyncio.wrap_future(pending))

    def _check(self) -> None:
        for torn in (self.run_dir / DIRECTORY).glob("*/*.part"):
            torn.unlink()
        newest = [path for kind in KINDS for path in list(rollout_files(self.run_dir, kind).values())[-CHECKED:]]
        if count := sum(read_file(path) is None for path in newest):
            log.warning(
                "%d of the %d newest files with saved samples are damaged: the report leaves them out",
                count,
                len(newest),
            )

    def _forget_oldest(self, newest: int) -> None:
        if self.limit is not None:
            forget_media(self.run_dir / DIRECTORY / MEDIA, self.limit)
        total = sum(self._sizes.values())
        for step, kind in sorted(self._sizes):
            if self.limit is None or total <= self.limit or step == newest:
                return
            if not self._limit_logged:
                log.info("samples on disk exceed --save-rollouts-size %d: the oldest steps are deleted", self.limit)
                self._limit_logged = True
            (self.run_dir / FILE.format(kind, step)).unlink(missing_ok=True)
            total -= self._sizes.pop((step, kind))


def _advise(error: OSError) -> str:
    """Return what to do about a file that could not be written."""
    if error.errno == errno.ENOENT:
        return "mount it again, and resume the run from its last checkpoint"
    return "free space there and resume the run, or resume it with --no-save-rollouts"


def make_saver(run: Run) -> SampleSaver:
    """Make the sink of ``--save-rollouts``."""
    options = run.config.run
    return SampleSaver(run.directory, run.tokenizer, options.save_rollouts_size if options.save_rollouts else None)
