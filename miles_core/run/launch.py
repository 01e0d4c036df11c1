"""Starting a run from an accepted plan: its directory, its log, its signals, its event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from miles_core.checkpoint.directory import Checkpoints, checkpoint_step, locate_checkpoint
from miles_core.data.field import SAMPLING_SUPPORT
from miles_core.errors import ConfigError
from miles_core.observe import log as logs
from miles_core.observe.environment import write_environment
from miles_core.observe.metrics import MetricLog, Sink
from miles_core.observe.progress import Progress
from miles_core.plugin.load import load_hooks
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.render import notices
from miles_core.run.run import Run

if TYPE_CHECKING:
    from rich.console import Console

    from miles_core.config.config import Config
    from miles_core.plugin.plan import Plan

log = logging.getLogger(__name__)


def launch(config: Config, plan: Plan, manifests: Mapping[str, Plugin], console: Console | None = None) -> Run:
    """Run the training loop to its end and return the finished run.

    Args:
        config: effective configuration, the plan's ``sets`` applied.
        plan: the accepted plan.
        manifests: every known manifest by name.
        console: where live output goes; standard error by default.
    """
    options = config.run
    resume_from = locate_checkpoint(options.load, json.loads(plan.to_json())) if options.load else None
    directory = run_directory(config, resume_from)
    modules = [h.target.split(".")[0].split(":")[0] for h in plan.hooks]
    console = logs.configure(config.run.log_level, directory, console, modules)
    run = make_run(config, plan, manifests, directory, resume_from)
    (directory / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    (directory / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    write_environment(directory)
    log.info("%s", plan.header)
    for line in notices(plan):
        log.info("%s", line)
    log.info("run directory: %s", directory)
    start = checkpoint_step(resume_from) if resume_from else None
    run.metrics = MetricLog(directory / "metrics.jsonl", resume_step=start, sinks=sinks(config, directory))
    run.progress = Progress(config.rollout.num_rollout, console, start=start or 0)
    from miles_core.loop import train

    with interruptible(run), run.progress:
        asyncio.run(train(run))
    return run


def make_run(
    config: Config, plan: Plan, manifests: Mapping[str, Plugin], directory: Path, resume_from: Path | None = None
) -> Run:
    """The run that a plan describes, with nothing built yet and nothing written."""
    fields = (SAMPLING_SUPPORT, *(f for p in plan.plugins for f in manifests[p.name].fields))
    return Run(config, plan, load_hooks(plan, manifests, config), fields, directory, resume_from)


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


def sinks(config: Config, directory: Path) -> list[Sink]:
    """The further places metrics go to."""
    found: list[Sink] = []
    if config.run.use_tensorboard:
        from miles_core.observe.sinks import TensorBoard

        found.append(TensorBoard(directory / "tensorboard"))
    if config.run.use_wandb:
        from miles_core.observe.sinks import WeightsAndBiases

        found.append(WeightsAndBiases(directory, directory.name, vars(config.args)))
    return found


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """The first Ctrl-C ends the run at the last completed step; a second one exits at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if run.stop_requested:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            sys.exit(130)
        run.stop_requested = True
        log.warning("stopping at the last completed step (Ctrl-C again exits at once)")

    try:
        previous = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
