"""What workers write, in the run's log with their names, and its last lines for messages.

A worker writes everything (its log, what libraries print, what a crash leaves) into a file of the run's directory; the driver
reads these files while the run goes on. So the last lines are there also of a process that was killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

#: The directory within the run's.
DIRECTORY = "workers"
#: Seconds between two looks at the files.
INTERVAL = 0.5
#: Lines of libraries that are remembered, because every worker writes them.
HEARD = 1000
#: Time and process, as some libraries begin their lines.
_STAMP = re.compile(r"[DIWEF]\d{4} \S+ +\d+ ")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
#: Lines that a message about a lost worker shows, bytes from the end in which they are looked for, and characters of each.
LAST, TAIL, WIDTH = 8, 8192, 240


def path_of(directory: Path | str, worker: str) -> Path:
    """The file that a worker of the run in ``directory`` writes."""
    return Path(directory) / DIRECTORY / f"{worker}.log"


def write_there(directory: Path | str, worker: str, level: str) -> None:
    """From now on, everything that this process writes and logs goes into its file."""
    path = path_of(directory, worker)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("miles_core").setLevel(level.upper())
    print(f"INFO {__name__}: process {os.getpid()} on {socket.gethostname()}", file=sys.stderr)  # whatever the level


def last_lines(directory: Path | str, worker: str) -> tuple[str, ...]:
    """What a worker wrote last; nothing where no file is."""
    try:
        with path_of(directory, worker).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line[:WIDTH] for line in text.splitlines() if line.strip())[-LAST:]


class Output:
    """Repeats in the run's log what workers write into the run's ``directory``; what a library has every worker say, once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / DIRECTORY
        # a run that is continued has the files of the one before
        self._read = {path: path.stat().st_size for path in self.directory.glob("*.log")}
        self._heard: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Begin, if it has not begun."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Repeat what is left and end."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._repeat()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            self._repeat()

    def _repeat(self) -> None:
        for path in sorted(self.directory.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            for line in whole.decode(errors="replace").splitlines():
                if line.strip() and not self._said_by_another(path.stem, line):
                    found = _LEVEL.match(line)
                    level = logging.getLevelNamesMapping()[found[1]] if found else logging.INFO
                    log.log(level, "%s: %s", path.stem, line[found.end() :] if found else line)

    def _said_by_another(self, worker: str, line: str) -> bool:
        """Whether a library's line was repeated already, for another worker."""
        head = _LEVEL.match(line) or _STAMP.match(line)
        if head is None or line.startswith("miles_", head.end()) or len(self._heard) > HEARD:
            return False
        words = line[head.end() :]
        return self._heard.setdefault(words, worker) != worker
