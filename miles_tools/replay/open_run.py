"""Checks of a run directory before it is read: that it is one, complete, not being written, and not of a newer version."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import MilesError
from miles_core.observe.metrics import read
from miles_core.run.directory import LOCK
from miles_core.version import __version__
from miles_tools.replay.steps import DIRECTORY, FORMAT, FORMAT_FILE, check_recorded, recorded_steps
from miles_tools.report.reading import check_directory, read_json, read_yaml

if TYPE_CHECKING:
    from miles_tools.replay import Replay

#: Files that every run directory has.
FILES = ("config.yaml", "plan.json", "metrics.jsonl")


def open_run(directory: Path | str) -> Path:
    """Return the path of a run directory that can be read.

    Raises:
        MilesError: it is no run directory, is incomplete, is being written, or was written by a newer version.
    """
    path = Path(directory)
    check_directory(path)
    if missing := next((name for name in FILES if not (path / name).is_file()), None):
        raise MilesError(f"{path} is not a run directory: it has no {missing}; give the one that --save named")
    _refuse_running(path)
    found = read_json(path / DIRECTORY / FORMAT_FILE).get("format", FORMAT)
    if not isinstance(found, int) or found > FORMAT:
        raise MilesError(
            f"{path / DIRECTORY} has the format {found}, and miles-core {__version__} reads up to {FORMAT}; use a later version"
        )
    if "defaults" not in read_yaml(path / "config.yaml"):  # which a run writes last
        raise MilesError(f"{path / 'config.yaml'} is incomplete: it ends before the defaults; restore it")
    if not any(record["step"] > 0 for record in read(path / "metrics.jsonl")):
        raise MilesError(f"{path}: this run has completed no step")
    return path.resolve()


def open_source(options: Replay) -> tuple[Path, int]:
    """Return the run whose recorded steps ``--debug-train-only`` trains on, and the last of these steps.

    Raises:
        MilesError: the run cannot be read, or the step was not recorded.
    """
    flag = f"--load-debug-rollout-data {options.load_debug_rollout_data}"
    try:
        source = open_run(options.load_debug_rollout_data or "")
        last = options.debug_last_step or max(recorded_steps(source), default=1)
        check_recorded(source, last)
    except MilesError as error:
        raise MilesError(f"{flag}: {error}") from error
    return source, last


def _refuse_running(path: Path) -> None:
    """Raise MilesError if a process holds the lock of the run directory. Does not change the lock file."""
    with suppress(FileNotFoundError, PermissionError):
        descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise MilesError(f"{path}: {holder} is writing this run; wait until it has ended, or stop it") from error
        except OSError:  # a file system without locks
            pass
        finally:
            os.close(descriptor)
