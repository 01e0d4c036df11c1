"""The directory a run lives in; never two runs in one."""

from __future__ import annotations

import time
from pathlib import Path

from miles_core.checkpoint.directory import Checkpoints
from miles_core.config.config import Config
from miles_core.errors import ConfigError


def run_directory(config: Config, resume_from: Path | None) -> Path:
    """``--save``, else the directory of the run that is continued, else ``runs/<model>-<time>``; never two runs in one."""
    options = config.run
    if options.save is None and resume_from is not None:
        return resume_from.parent.parent
    label = config.model.model_name or Path(config.model.hf_checkpoint or "run").name
    directory = Path(options.save) if options.save else Path("runs") / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    if resume_from is None or directory.resolve() != resume_from.parent.parent.resolve():
        _refuse_to_overwrite(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--save {directory}: the directory cannot be made ({error.strerror})") from error
    return directory


def _refuse_to_overwrite(directory: Path) -> None:
    """A run that left a checkpoint or a metric stays as it is; one that failed before may be started again."""
    metrics = directory / "metrics.jsonl"
    if Checkpoints(directory / "checkpoints").latest() is not None:
        raise ConfigError(
            f"--save {directory} already holds a run; continue it with --load {directory}, or choose another directory"
        )
    if metrics.exists() and metrics.stat().st_size:
        raise ConfigError(
            f"--save {directory} already holds the metrics of a run without a checkpoint; "
            "choose another directory, or delete it"
        )
