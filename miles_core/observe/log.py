"""Log output: a terminal handler and ``run.log`` in the run directory.

Modules log through ``logging.getLogger(__name__)``. Only our own loggers (and those of the plugins passed to ``configure``) emit
records below WARNING, so that messages of libraries do not obscure those of the run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError
from miles_core.redact import RedactingFormatter

if TYPE_CHECKING:
    from rich.console import Console

LEVELS = ("debug", "info", "warning", "error")
_MARK = "miles"
#: ``extra`` of a record for ``run.log`` only; the terminal shows the same information in another form.
FILE_ONLY = {"file_only": True}


def is_debugging() -> bool:
    """True when ``MILES_DEBUG`` asks for debug output and for tracebacks of user errors."""
    return os.environ.get("MILES_DEBUG", "0") not in ("", "0")


class _File(logging.FileHandler):
    """Handler of ``run.log``. If the file cannot be written (a full disk), it prints one warning instead of a traceback per line."""

    _warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._warned:
            self._warned = True
            print(f"warning: {self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)


class _Holder(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def hold_records() -> Iterator[list[logging.LogRecord]]:
    """Collect the records of ``miles_core`` that the body logs before ``configure`` is called, for ``release_records``. If the body raises,
    warnings and errors are released to the current handlers."""
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("miles_core")
    level, propagate = logger.level, logger.propagate
    holder = _Holder(records)
    logger.addHandler(holder)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    failed = True
    try:
        yield records
        failed = False
    finally:
        logger.removeHandler(holder)
        logger.propagate = propagate
        logger.setLevel(level)
        if failed:
            release_records([record for record in records if record.levelno >= logging.WARNING])


def release_records(records: Iterable[logging.LogRecord]) -> None:
    """Log held records."""
    for record in records:
        logging.getLogger(record.name).handle(record)


def configure(
    level: str = "info", run_dir: Path | str | None = None, console: Console | None = None, loggers: Iterable[str] = ()
) -> Console:
    """Configure the program's log output; a later call replaces an earlier one.

    Args:
        level: one of ``LEVELS``; ``MILES_DEBUG=1`` makes it ``debug``.
        run_dir: directory of ``run.log``, which receives records with times and module names at ``level``, at least at info.
        console: console for terminal output, shared with the live progress; standard error by default, no output if it is quiet.
        loggers: further top-level logger names (plugins' modules) that log at ``level``.

    Returns:
        The console, for ``Progress``.
    """
    from rich.console import Console

    if level not in LEVELS:
        raise ConfigError(f"--log-level {level}: choose one of {', '.join(LEVELS)}")
    number = logging.DEBUG if is_debugging() else getattr(logging, level.upper())
    console = console or Console(stderr=True)
    root = logging.getLogger()
    for handler in [h for h in root.handlers if h.get_name() == _MARK]:
        root.removeHandler(handler)
        handler.close()
    terminal = _terminal(console)
    terminal.setLevel(number)
    terminal.addFilter(lambda record: not getattr(record, "file_only", False))
    handlers: list[logging.Handler] = [terminal]
    if run_dir is not None:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        file = _File(Path(run_dir) / "run.log", encoding="utf-8", errors="backslashreplace")
        file.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        file.setLevel(min(number, logging.INFO))
        handlers.append(file)
    for handler in handlers:
        handler.set_name(_MARK)
        root.addHandler(handler)
    for name in ("miles_core", *loggers):
        logging.getLogger(name).setLevel(min(number, logging.INFO))
    return console


def _terminal(console: Console) -> logging.Handler:
    """Return the terminal handler: formatted text on a terminal, plain lines otherwise, nothing on a quiet console."""
    from rich.logging import RichHandler

    if console.quiet:
        return logging.NullHandler()
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=is_debugging(), log_time_format="[%X]", markup=False)
        handler.setFormatter(RedactingFormatter("%(message)s"))
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    return handler
