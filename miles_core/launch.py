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
from miles_core.errors import ConfigError, MilesError
from miles_core.loop import train
from miles_core.observe import log as logs
from miles_core.observe.environment import write_environment
from miles_core.observe.progress import Progress
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.render import notices
from miles_core.redact import redact
from miles_core.run.checks import check_inputs
from miles_core.run.directory import claim_directory
from miles_core.run.ending import ENDING, Ending, ending
from miles_core.run.make import make_log, packages
from miles_core.run.prepare import set_environment
from miles_core.run.stopping import Deadline, OutOfTime

if TYPE_CHECKING:
    from rich.console import Console

    from miles_core.config.config import Config
    from miles_core.plugin.plan import Plan
    from miles_core.run.log import RunLog

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
    with claim_directory(config) as directory:
        set_environment(plan)
        run, inputs = check_inputs(config, plan, manifests, directory)
        load = config.run.load
        resume_from = None
        if load is not None:
            resume_from = locate_checkpoint(load, plan.record())
        console = logs.configure(config.run.log_level, directory, console, packages(plan, manifests))
        _write_start(run)
        log.info("%s", plan.header)
        for line in notices(plan):
            log.info("%s", line)
        log.info("run directory: %s", directory)
        for change in changes(resume_from, plan.record()) if resume_from else ():
            log.warning("continuing with a change: %s", change)
        start = checkpoint_step(resume_from) if resume_from else None
        run_log = _open_log(run, manifests, Progress(config.rollout.num_rollout, console, start=start or 0), start)
        seed_generators(config.train.seed)
        with interruptible(run) as stopped:
            try:
                with run_log.progress:
                    try:
                        parts = _completed(stopped.deadline.limit(train(run, run_log, inputs, resume_from)))
                    finally:
                        run_log.close()
            except OutOfTime as error:
                log.warning("%s", error)
                parts = []
            except Exception as error:
                log.error("the run ended", exc_info=error, extra=logs.FILE_ONLY)
                _tell(ending(run, error=error), error)
                raise
        end = ending(run, signal=stopped.name)
        _tell(end)
        return Launched(run, parts, end, stopped.signals[-1] if stopped.signals else 0)


def _open_log(run: Run, manifests: Mapping[str, Plugin], progress: Progress, start: int | None) -> RunLog:
    """``make_log``; an error (a sink that cannot be reached) is recorded as the end of the run."""
    try:
        return make_log(run, manifests, progress, start)
    except MilesError as error:
        run.step = start or 0
        _tell(ending(run, error=error), error)
        raise


def _completed(coroutine: Coroutine[Any, Any, list[PolicyParts]]) -> list[PolicyParts]:
    """What a coroutine returns; run in a thread where this one's event loop is already running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


class Stopped:
    """The signals that asked a run to stop, in order, and the time it has after SIGTERM."""

    def __init__(self, run: Run) -> None:
        self.run, self.signals = run, list[signal.Signals]()
        self.deadline = Deadline(run.config.run.stop_within, self._exit)

    @property
    def name(self) -> str | None:
        """The last signal's name; None without a signal."""
        return self.signals[-1].name if self.signals else None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The first signal requests a stop; a second Ctrl-C exits at once."""
        run, again = self.run, signal.SIGINT in self.signals
        self.signals.append(signal.Signals(number))
        if number == signal.SIGINT and again:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        if number == signal.SIGHUP and sys.stderr is sys.__stderr__ and os.isatty(2):
            _leave_terminal()
        if number == signal.SIGTERM:
            self.deadline.begin(number)
        if not run.stop_requested:
            limit = f", within {run.config.run.stop_within:g} s" if number == signal.SIGTERM else ""
            log.warning("%s: stopping at the last completed step%s (Ctrl-C again exits at once)", self.name, limit)
        run.stop_requested = True

    def _exit(self) -> None:
        """The last lines of a run whose process ends itself."""
        log.error(
            "the run does not come to its end: the process exits %g s after %s",
            self.run.config.run.stop_within,
            self.name,
        )
        _tell(ending(self.run, signal=self.name))


@contextmanager
def interruptible(run: Run) -> Iterator[Stopped]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends the run at the last completed step, SIGTERM within ``--stop-within`` seconds; a second
    Ctrl-C exits at once.

    Yields the signals that came. One that was ignored before (``nohup``) is left alone.
    """
    stopped = Stopped(run)
    previous: dict[signal.Signals, Any] = {}
    try:
        for number in SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, stopped.handle)
        previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, stopped.deadline.interrupt)
    except ValueError:  # not the main thread: the caller handles signals
        yield stopped
        return
    try:
        yield stopped
    finally:
        stopped.deadline.close()
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
        (run.directory / ENDING).unlink(missing_ok=True)  # how an earlier process of this run ended
        (run.directory / "config.yaml").write_text(redact(run.config.to_yaml()), encoding="utf-8")
        (run.directory / "plan.json").write_text(json.dumps(run.plan.record()), encoding="utf-8")
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
