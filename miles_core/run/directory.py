"""The run directory: holds one run, is locked by one process at a time, and is removed again if the start fails."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from miles_core.checkpoint.directory import Checkpoints, run_of
from miles_core.config.config import Config
from miles_core.errors import ConfigError
from miles_core.observe.metrics import read

log = logging.getLogger(__name__)

#: Lock file held while a process writes to the directory; the operating system releases the lock when the process ends.
LOCK = ".lock"


def run_directory(config: Config) -> Path:
    """Return ``--save``, else the directory of the run that ``--load`` continues, else ``runs/<model>-<time>``. Creates nothing."""
    options = config.run
    if options.save is not None:
        return Path(options.save)
    if options.load is not None:
        return run_of(options.load)
    label = config.model.model_name or Path(config.model.hf_checkpoint or "run").absolute().name
    if Path(label).name != label:
        raise ConfigError(f"--model-name {label}: it is a part of the run directory's name; leave / and .. out")
    return Path("runs") / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextmanager
def claim_directory(config: Config) -> Iterator[Path]:
    """Create the run directory if necessary and lock it for this process during the body.

    If the body raises, new directories are removed unless they hold a file other than the lock; a new lock in an existing directory
    is removed too.

    Raises:
        ConfigError: another process holds the lock, the directory holds another run, or it cannot be created.
    """
    directory = run_directory(config)
    refuse_links(directory)  # first: reading a named pipe would wait for ever
    refuse_to_overwrite(config)
    made = [p for p in (directory, *directory.parents) if not p.exists()]
    locked_before = (directory / LOCK).exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        _remove(made)
        raise ConfigError(f"--save {directory}: the directory cannot be made or written ({error.strerror})") from error
    failed = True
    try:
        _lock(descriptor, directory)
        refuse_links(directory)  # again, now that no other run writes
        refuse_to_overwrite(config, locked=True)  # again, now that no other process writes
        Checkpoints(directory / "checkpoints").recover()
        yield directory
        failed = False
    finally:
        if failed:
            _remove(made)
            if not made and not locked_before:
                (directory / LOCK).unlink()  # a process that has just opened it notices the removal (``_lock``)
        os.close(descriptor)


def refuse_links(directory: Path) -> None:
    """Reject a run directory that contains links or special files, at any depth.

    Through a symbolic or hard link, a run would overwrite files elsewhere. The directory itself may be a symbolic link, and so may
    entries whose target is within the directory.

    Raises:
        ConfigError: names the first such entry.
    """
    for root, directories, files in os.walk(directory):
        for name in (*directories, *files):
            entry = Path(root) / name
            found = entry.lstat()
            if stat.S_ISLNK(found.st_mode):
                if entry.resolve().is_relative_to(directory.resolve()):  # such as "latest" of a metrics service
                    continue
                what = f"is a symbolic link to {os.readlink(entry)}"
            elif stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and Path(root) == directory:
                what = "is a hard link: the file has another name elsewhere"
            elif not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
                what = "is neither a file nor a directory"
            else:
                continue
            raise ConfigError(
                f"--save {directory}: {entry} {what}; a run does not create such entries: remove it, or choose another directory"
            )


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(descriptor).st_nlink:  # a start that was refused has just removed the directory
            raise BlockingIOError
    except BlockingIOError as error:
        raise _describe_holder(descriptor, directory) from error
    except OSError as error:  # a file system without locks
        log.warning("%s cannot be locked (%s): make sure that no other process writes there", directory, error.strerror)
    with suppress(OSError):  # optional: another process shows this text if it finds the lock held
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _describe_holder(descriptor: int, directory: Path) -> ConfigError:
    """Return the error for a lock that another process holds."""
    holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
    return ConfigError(
        f"--save {directory}: {holder} is writing this run; wait until it has ended, stop it, or choose another directory"
    )


def _refuse_locked(directory: Path) -> None:
    """Raise ConfigError if a process holds the lock of ``directory``. Creates nothing."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _describe_holder(descriptor, directory) from error
    except OSError:  # a file system without locks
        pass
    finally:
        os.close(descriptor)


def _remove(made: list[Path]) -> None:
    """Remove new directories, innermost first, if they are empty or hold only the lock."""
    for directory in made:
        if [entry.name for entry in directory.iterdir()] == [LOCK] if directory.is_dir() else False:
            (directory / LOCK).unlink()
        with suppress(OSError):
            directory.rmdir()


def refuse_unwritable(option: str, target: Path) -> None:
    """Raise ConfigError unless the directory ``target`` can be created or written.

    Creates and removes a temporary directory in the nearest existing directory, because permissions alone do not detect a full
    disk or a read-only kernel file system.
    """
    try:
        target.stat()
    except FileNotFoundError:
        pass
    except OSError as error:  # a circular link, or a file instead of a parent directory
        raise ConfigError(f"{option}: {error.strerror}; choose another directory") from error
    nearest = next(p for p in (target, *target.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{option}: {nearest} is a file; choose another directory")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".miles-", dir=nearest))
    except OSError as error:
        raise ConfigError(
            f"{option}: {nearest} cannot be written ({error.strerror}); choose another directory"
        ) from error


def refuse_unusable_run(config: Config) -> None:
    """Raise ConfigError if ``--load`` names a directory whose options cannot be continued, and the flags name no model either."""
    load = config.run.load
    if load is None or config.model.hf_checkpoint is not None:
        return
    directory = run_of(load)
    if not directory.is_dir():
        raise ConfigError(f"--load {load}: no such directory; give a run directory or one of its checkpoints")
    if not (directory / "config.yaml").is_file():
        raise ConfigError(
            f"--load {load}: it holds no config.yaml, so it is not a complete run directory; give the directory that a run was "
            "saved in, or all flags of that run"
        )
    if not (directory / "checkpoints").is_dir():
        _refuse_locked(directory)
        raise ConfigError(
            f"--load {load}: this run ended before its first checkpoint; start it again with --config {directory / 'config.yaml'} "
            "and another --save"
        )


def refuse_to_overwrite(config: Config, locked: bool = False) -> None:
    """Raise ConfigError if the run directory holds a checkpoint or the metrics of a step, unless ``--load`` continues that run, or if another
    process writes there. A run that failed before its first step may be started again. locked: whether this process holds the lock."""
    directory, load = run_directory(config), config.run.load
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--save {directory}: it is a file; name a directory")
    if not locked:  # first: the messages below advise to delete the directory
        _refuse_locked(directory)
    if load is not None and run_of(load).resolve() == directory.resolve():
        return
    if Checkpoints(directory / "checkpoints").find_latest() is not None:
        raise ConfigError(
            f"--save {directory} already holds a run; continue it with --load {directory}, or choose another directory"
        )
    if any(record["step"] > 0 for record in read(directory / "metrics.jsonl")):
        raise ConfigError(
            f"--save {directory} already holds the metrics of a run without a checkpoint; "
            "choose another directory, or delete it"
        )
