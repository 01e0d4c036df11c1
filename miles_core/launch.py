"""Starting a run: its directory, its log, its signals, its event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from miles_core.checkpoint.directory import changes, checkpoint_step, locate_checkpoint
from miles_core.checkpoint.rng import seed_generators
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.errors import ConfigError
from miles_core.loop import train
from miles_core.observe import log as logs
from miles_core.observe.environment import write_environment
from miles_core.observe.progress import Progress
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.render import notices
from miles_core.run.checks import checked
from miles_core.run.directory import claimed
from miles_core.run.ending import Ending, ending
from miles_core.run.make import make_log
from miles_core.run.prepare import set_environment

if TYPE_CHECKING:
    from rich.console import Console

    from miles_core.config.config import Config
    from miles_core.plugin.plan import Plan

log = logging.getLogger(__name__)

#: What ends a run at its last completed step.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Launched:
    """A run that has ended, and what it was built of (released; empty when it ended before).

    Attributes:
        ending: what the last lines of the run say.
        signal: the number of the signal that stopped it; 0 when it ran to its end.
    """

    run: Run
    parts: list[PolicyParts]
    ending: Ending
    signal: int = 0


def launch(config: Config, plan: Plan, manifests: Mapping[str, Plugin], console: Console | None = None) -> Launched:
    """Run the training loop to its end. Works inside of a running event loop (a notebook's) too.

    Args:
        config: effective configuration, the plan's ``sets`` applied.
        plan: the accepted plan.
        manifests: every known manifest by name.
        console: where live output goes; standard error by default.

    Raises:
        MilesError: what is wrong with the inputs, all of it and before anything is built; or what ended the run. Its notes say
            where the last completed step is kept.
    """
    with claimed(config) as directory:
        set_environment(plan)
        run, inputs = checked(config, plan, manifests, directory)
        load = config.run.load
        resume_from = None
        if load is not None:
            resume_from = locate_checkpoint(load, json.loads(plan.to_json()))
        provided = [t for name in plan.order for part in manifests[name].provides.values() for t in part.values()]
        modules = [t.split(".")[0].split(":")[0] for t in (*(h.target for h in plan.hooks), *provided)]
        console = logs.configure(config.run.log_level, directory, console, modules)
        _write_start(run)
        log.info("%s", plan.header)
        for line in notices(plan):
            log.info("%s", line)
        log.info("run directory: %s", directory)
        for change in changes(resume_from, json.loads(plan.to_json())) if resume_from else ():
            log.warning("continuing with a change: %s", change)
        start = checkpoint_step(resume_from) if resume_from else None
        told = make_log(run, manifests, Progress(config.rollout.num_rollout, console, start=start or 0), start)
        seed_generators(config.train.seed)
        with interruptible(run) as stopped:
            try:
                with told.progress:
                    try:
                        parts = _completed(train(run, told, inputs, resume_from))
                    finally:
                        told.close()
            except Exception as error:
                log.error("the run ended", exc_info=error, extra=logs.FILE_ONLY)
                _tell(ending(run, error=error), error)
                raise
        end = ending(run, signal=stopped[-1].name if stopped else None)
        _tell(end)
        return Launched(run, parts, end, stopped[-1] if stopped else 0)


def _completed(coroutine: Coroutine[Any, Any, list[PolicyParts]]) -> list[PolicyParts]:
    """What a coroutine returns; run in a thread where this one's event loop is already running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@contextmanager
def interruptible(run: Run) -> Iterator[list[signal.Signals]]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends the run at the last completed step; a second Ctrl-C exits at once.

    Yields the list of the signals that came. One that was ignored before (``nohup``) is left alone.
    """
    came: list[signal.Signals] = []

    def handle(number: int, frame: FrameType | None) -> None:
        again = signal.SIGINT in came
        came.append(signal.Signals(number))
        if number == signal.SIGINT and again:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        if number == signal.SIGHUP and sys.stderr is sys.__stderr__ and os.isatty(2):
            _leave_terminal()
        if not run.stop_requested:
            log.warning("%s: stopping at the last completed step (Ctrl-C again exits at once)", came[-1].name)
        run.stop_requested = True

    previous: dict[signal.Signals, Any] = {}
    try:
        for number in SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handle)
    except ValueError:  # not the main thread: the caller handles signals
        yield came
        return
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """The terminal is gone: what is written to it goes nowhere, instead of ending the run with an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.dup2(nowhere, descriptor)


def _write_start(run: Run) -> None:
    """What the run is: its configuration, plan and machine."""
    try:
        (run.directory / "config.yaml").write_text(run.config.to_yaml(), encoding="utf-8")
        (run.directory / "plan.json").write_text(run.plan.to_json(), encoding="utf-8")
        write_environment(run.directory)
    except OSError as error:
        raise ConfigError(
            f"--save {run.directory}: {error.filename or 'a file in it'} cannot be written ({error.strerror}); free space there, or choose another "
            "directory"
        ) from error


def _tell(found: Ending, error: Exception | None = None) -> None:
    """The last lines: logged, or where an error is still to be shown, notes that come after it."""
    for line in found.lines():
        if error is None:
            log.info("%s", line)
        else:
            log.error("%s", line, extra=logs.FILE_ONLY)
    if error is not None:
        error.add_note("\n".join(found.lines()[1:]))
