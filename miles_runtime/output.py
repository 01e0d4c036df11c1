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
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from miles_core.observe.log import RedactingFormatter
from miles_core.redact import redact

log = logging.getLogger(__name__)

#: The directory within the run's.
DIRECTORY = "workers"
#: Seconds between two looks at the files.
INTERVAL = 0.5
#: Lines of libraries that are remembered, because every worker writes them.
HEARD = 1000
#: Time and process, as some libraries begin their lines.
_STAMP = re.compile(r"[DIWEF]\d{4} \S+ +\d+ ")
_BRACKETED = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,]+ [DIW] ")
_ERROR = re.compile(r"Error|Exception|Traceback|FATAL|CRITICAL|[Kk]illed|[Ss]egmentation")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
#: The first line of every process.
_PROCESS = f"INFO {__name__}: process"
#: Lines that a message about a lost worker shows, bytes from the end in which they are looked for, and characters of each.
LAST, TAIL, WIDTH = 8, 8192, 240


def path_of(directory: Path | str, worker: str) -> Path:
    """The file that a worker of the run in ``directory`` writes."""
    return Path(directory) / DIRECTORY / f"{worker}.log"


def write_there(directory: Path | str, worker: str, level: str) -> None:
    """From now on, everything that this process writes and logs goes into its file."""
    path = path_of(directory, worker)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.basicConfig(stream=sys.stderr, force=True)
    logging.getLogger().handlers[0].setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger().setLevel(logging.WARNING)
    for package in ("miles_core", __name__.partition(".")[0]):
        logging.getLogger(package).setLevel(level.upper())
    print(f"{_PROCESS} {os.getpid()} on {socket.gethostname()}", file=sys.stderr)  # whatever the level


def last_lines(directory: Path | str, worker: str) -> tuple[str, ...]:
    """The last lines that a worker's process wrote, without what libraries have every worker write; nothing where no file is."""
    path = path_of(directory, worker)
    lines = _tail(path)
    starts = [at for at, line in enumerate(lines) if _PROCESS in line]
    lines = lines[starts[-1] + 1 :] if starts else lines  # those before it are of the process that this one replaced
    others = {line for other in path.parent.glob("*.log") if other != path for line in _tail(other)}
    own = [line for line in lines if not _is_noise(line, others)]
    return tuple(redact(line)[:WIDTH] for line in own)[-LAST:]


def _tail(path: Path) -> list[str]:
    """The last lines of a file that are not empty; of progress bars, which write over themselves, the last state."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line.strip()]


def _is_noise(line: str, others: Collection[str]) -> bool:
    """Whether a line is a library's remark below the level of an error, or one that another worker wrote too. Parts of a traceback are
    kept."""
    if _ERROR.search(line) or line[0].isspace():
        return False
    level = _LEVEL.match(line)
    if _STAMP.match(line) or _BRACKETED.match(line):
        return True
    return line in others or (level is not None and not line.startswith("miles_", level.end()))


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
