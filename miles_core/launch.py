"""Starting a run: its directory, its log, its signals, its event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from miles_core.checkpoint.directory import checkpoint_step, locate_checkpoint
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.loop import train
from miles_core.observe import log as logs
from miles_core.observe.environment import write_environment
from miles_core.observe.progress import Progress
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.render import notices
from miles_core.run.directory import run_directory
from miles_core.run.make import make_log, make_run
from miles_core.run.prepare import set_environment

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
    provided = [target for name in plan.order for part in manifests[name].provides.values() for target in part.values()]
    modules = [target.split(".")[0].split(":")[0] for target in (*(h.target for h in plan.hooks), *provided)]
    console = logs.configure(config.run.log_level, directory, console, modules)
    set_environment(plan)
    run = make_run(config, plan, manifests, directory)
    (directory / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    (directory / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    write_environment(directory)
    log.info("%s", plan.header)
    for line in notices(plan):
        log.info("%s", line)
    log.info("run directory: %s", directory)
    start = checkpoint_step(resume_from) if resume_from else None
    told = make_log(run, manifests, Progress(config.rollout.num_rollout, console, start=start or 0), start)
    with interruptible(run), told.progress:
        try:
            parts = asyncio.run(train(run, told, resume_from))
        finally:
            told.close()
    return Launched(run, parts)


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
