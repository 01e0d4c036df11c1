"""Log output: a terminal handler and ``run.log`` in the run directory.

Modules log through ``logging.getLogger(__name__)``. Only our own loggers (and those of the plugins named to
``configure``) speak below WARNING, so a library's chatter does not drown the run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError
from miles_core.redact import redact

if TYPE_CHECKING:
    from rich.console import Console

LEVELS = ("debug", "info", "warning", "error")
_MARK = "miles"
#: ``extra`` of a record that goes to ``run.log`` and not to the terminal, where the same is shown in another way.
FILE_ONLY = {"file_only": True}


def debugging() -> bool:
    """True when ``MILES_DEBUG`` asks for debug output and for tracebacks of user errors."""
    return os.environ.get("MILES_DEBUG", "0") not in ("", "0")


class RedactingFormatter(logging.Formatter):
    """A formatter whose lines, tracebacks included, hold no credentials."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _File(logging.FileHandler):
    """``run.log``; where it cannot be written (a full disk) that is said once, without a traceback for every line."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            print(f"warning: {self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)


def configure(
    level: str = "info",
    run_dir: Path | str | None = None,
    console: Console | None = None,
    loggers: Iterable[str] = (),
) -> Console:
    """Set the program's log output up; a later call replaces an earlier one.

    Args:
        level: one of ``LEVELS``; ``MILES_DEBUG=1`` makes it ``debug``.
        run_dir: where ``run.log`` is appended to, with times and module names, at ``level`` but never above info.
        console: where the terminal output goes, nowhere where it is quiet; standard error by default, and shared with the live
            progress.
        loggers: further top-level logger names (plugins' modules) that speak at ``level``.

    Returns:
        The console, for ``Progress``.
    """
    from rich.console import Console

    if level not in LEVELS:
        raise ConfigError(f"--log-level {level}: choose one of {', '.join(LEVELS)}")
    number = logging.DEBUG if debugging() else getattr(logging, level.upper())
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
    """What a person reads: marked up on a terminal, plain lines elsewhere, nothing on a quiet console."""
    from rich.logging import RichHandler

    if console.quiet:
        return logging.NullHandler()
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=debugging(), log_time_format="[%X]", markup=False)
        handler.setFormatter(RedactingFormatter("%(message)s"))
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    return handler
