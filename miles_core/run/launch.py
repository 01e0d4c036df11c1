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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from miles_core.checkpoint.directory import Checkpoints, checkpoint_step, locate_checkpoint
from miles_core.contracts.hooks import load_hooks
from miles_core.contracts.policy import Policy
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.data.field import SAMPLING_SUPPORT
from miles_core.data.template import PromptTemplate
from miles_core.data.tokenizer import load_tokenizer
from miles_core.errors import ConfigError
from miles_core.observe import log as logs
from miles_core.observe.environment import write_environment
from miles_core.observe.hints import Hints, hints_of
from miles_core.observe.metrics import MetricLog, Sink
from miles_core.observe.progress import Progress
from miles_core.observe.timer import Profiler
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.render import notices
from miles_core.run.log import RunLog

if TYPE_CHECKING:
    from rich.console import Console

    from miles_core.config.config import Config
    from miles_core.plugin.plan import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launched:
    """A run that has ended, and what it was built of (released; empty when it ended before)."""

    run: Run
    parts: list[PolicyParts]


def launch(config: Config, plan: Plan, manifests: Mapping[str, Plugin], console: Console | None = None) -> Launched:
    """Run the training loop to its end.

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
    run = make_run(config, plan, manifests, directory)
    (directory / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    (directory / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    write_environment(directory)
    log.info("%s", plan.header)
    for line in notices(plan):
        log.info("%s", line)
    log.info("run directory: %s", directory)
    start = checkpoint_step(resume_from) if resume_from else None
    from miles_core.loop import train

    told = make_log(run, manifests, Progress(config.rollout.num_rollout, console, start=start or 0), start)
    with interruptible(run), told.progress:
        try:
            parts = asyncio.run(train(run, told, resume_from))
        finally:
            told.close()
    return Launched(run, parts)


def make_run(config: Config, plan: Plan, manifests: Mapping[str, Plugin], directory: Path) -> Run:
    """The run that a plan describes, with nothing built yet and nothing written.

    Raises:
        CheckpointError, ConfigError: the checkpoint's tokenizer cannot be used.
    """
    tokenizer = load_tokenizer(config.model.hf_checkpoint, config.model.trust_remote_code)
    return Run(
        config=config,
        plan=plan,
        hooks=load_hooks(plan, manifests, config),
        fields=(SAMPLING_SUPPORT, *(f for p in plan.plugins for f in manifests[p.name].fields)),
        directory=directory,
        tokenizer=tokenizer,
        render=PromptTemplate(tokenizer, config.data.apply_chat_template),
        policies=[Policy(hf_checkpoint=config.model.hf_checkpoint or "")],
    )


def make_log(run: Run, manifests: Mapping[str, Plugin], progress: Progress, start: int | None) -> RunLog:
    """The log of a run that starts at step ``start`` (None: anew), with the hints of every plugin in ``manifests``."""
    options = run.config.run
    return RunLog(
        run.directory,
        MetricLog(run.directory / "metrics.jsonl", resume_step=start, sinks=sinks(run.config, run.directory)),
        progress,
        Hints(hints_of(manifests.values(), run.plan.holds)),
        Profiler(options.profile_dir or run.directory / "profile", count=int(options.profile)),
    )


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
