"""Copies the workers' output to the run's log with their names, and finds its last lines for error messages.

A worker writes all output (its log, prints of libraries, crash dumps) to a file in the run directory; the driver reads these
files during the run. The last lines are therefore available even if the process was killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from itertools import islice
from pathlib import Path

from miles_core.redact import RedactingFormatter, RedactingStream, redact

log = logging.getLogger(__name__)

#: Subdirectory of the run directory.
DIRECTORY = "workers"
#: Interval in seconds at which the files are read.
INTERVAL = 0.5
#: Number of library lines that are remembered to drop repetitions by other workers.
HEARD = 1000
#: Time stamp and process id at the start of some libraries' lines.
_STAMP = re.compile(r"[DIWEF]\d{4} \S+ +\d+ ")
_BRACKETED = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,]+ [DIW] ")
_ERROR = re.compile(r"Error|Exception|Traceback|FATAL|CRITICAL|[Kk]illed|[Ss]egmentation")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
#: The first line of every process.
_PROCESS = f"INFO {__name__}: process"
#: Number of other workers whose output shows which lines libraries print in every worker.
OTHERS = 32
#: A message about a lost worker shows up to LAST lines from the last TAIL bytes, each truncated to WIDTH characters.
LAST, TAIL, WIDTH = 8, 8192, 240


def path_of(directory: Path | str, worker: str) -> Path:
    """Return the output file of a worker of the run in ``directory``."""
    return Path(directory) / DIRECTORY / f"{worker}.log"


#: Name of the worker in this process.
_worker = ""


def worker_name() -> str:
    """Return the name of the worker in this process; empty in the driver. Workers share the run directory, so they name files after it."""
    return _worker


def write_there(directory: Path | str, worker: str, level: str) -> None:
    """Redirect all output and logs of this process to the worker's file."""
    global _worker
    _worker, path = worker, path_of(directory, worker)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = RedactingStream.of(1), RedactingStream.of(2)
    logging.basicConfig(stream=sys.stderr, force=True)
    logging.getLogger().handlers[0].setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger().setLevel(logging.WARNING)
    for package in ("miles_core", __name__.partition(".")[0]):
        logging.getLogger(package).setLevel(level.upper())
    print(f"{_PROCESS} {os.getpid()} on {socket.gethostname()}", file=sys.stderr)  # whatever the level


def last_lines(directory: Path | str, worker: str) -> tuple[str, ...]:
    """Return the last lines that a worker wrote, without lines that libraries print in every worker; empty if there is no file."""
    path = path_of(directory, worker)
    lines = _tail(path)
    starts = [at for at, line in enumerate(lines) if _PROCESS in line]
    lines = lines[starts[-1] + 1 :] if starts else lines  # earlier lines belong to the process that this one replaced
    others = {line for other in islice(path.parent.glob("*.log"), OTHERS) if other != path for line in _tail(other)}
    own = [line for line in lines if not _is_noise(line, others)]
    return tuple(redact(line)[:WIDTH] for line in own)[-LAST:]


def _tail(path: Path) -> list[str]:
    """Return the last non-empty lines of a file; for progress bars, which overwrite themselves, the last state."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line.strip()]


def _is_noise(line: str, others: Collection[str]) -> bool:
    """Return whether a line is a library message below error level, or one that another worker wrote too. Lines of tracebacks are not
    noise."""
    if _ERROR.search(line) or line[0].isspace():
        return False
    level = _LEVEL.match(line)
    if _STAMP.match(line) or _BRACKETED.match(line):
        return True
    return line in others or (level is not None and not line.startswith("miles_", level.end()))


class Output:
    """Copies the workers' output in the run's ``directory`` to the run's log. Library lines common to all workers appear once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / DIRECTORY
        # a resumed run finds the files of the previous process
        self._read = {path: path.stat().st_size for path in self.directory.glob("*.log")}
        self._heard: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Start copying, unless started already."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Copy the remaining output and stop."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._repeat()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            await self._repeat()

    async def _repeat(self) -> None:
        """Copy new lines. The files of thousands of workers are read in a thread, so that the event loop does not wait for the disk."""
        reading = asyncio.ensure_future(asyncio.to_thread(self._read_new))
        try:
            found = await asyncio.shield(reading)
        except asyncio.CancelledError:  # a thread cannot be cancelled; what it has read must not be lost
            self._copy(await reading)
            raise
        self._copy(found)

    def _read_new(self) -> list[tuple[str, str]]:
        """Return (worker, complete new lines) of every file that has grown, by name. Only those are opened."""
        new = []
        with suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            grown = [
                Path(entry.path)
                for entry in entries
                if entry.name.endswith(".log") and entry.stat().st_size > self._read.get(Path(entry.path), 0)
            ]
            for path in sorted(grown):
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    whole, newline, _ = file.read().rpartition(b"\n")
                self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
                new.append((path.stem, whole.decode(errors="replace")))
        return new

    def _copy(self, new: list[tuple[str, str]]) -> None:
        """Log the lines under their workers' names."""
        for worker, text in new:
            for line in text.splitlines():
                if line.strip() and not self._is_repeated(worker, line):
                    found = _LEVEL.match(line)
                    level = logging.getLevelNamesMapping()[found[1]] if found else logging.INFO
                    log.log(level, "%s: %s", worker, line[found.end() :] if found else line)

    def _is_repeated(self, worker: str, line: str) -> bool:
        """Return whether a library's line was already copied for another worker."""
        head = _LEVEL.match(line) or _STAMP.match(line)
        if head is None or line.startswith("miles_", head.end()) or len(self._heard) > HEARD:
            return False
        words = line[head.end() :]
        return self._heard.setdefault(words, worker) != worker
