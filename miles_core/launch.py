"""Start a run: set up its directory, log, signal handlers and event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from miles_core.checkpoint.directory import changes, checkpoint_step, locate_checkpoint
from miles_core.checkpoint.rng import seed_generators
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.errors import (
    CheckpointError,
    ConfigError,
    MilesError,
    MismatchError,
    NonFiniteError,
    OutOfTime,
    PluginError,
    SyncError,
)
from miles_core.loop import train
from miles_core.observe import log as logs
from miles_core.observe.environment import write_environment
from miles_core.observe.terminal import TerminalProgress
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.render import list_notices
from miles_core.redact import redact
from miles_core.run.checks import check_inputs
from miles_core.run.directory import claim_directory
from miles_core.run.ending import ENDING, Ending, find_untrained, is_complete, record_ending
from miles_core.run.executor import DaemonExecutor
from miles_core.run.exits import locate_error, report_exits
from miles_core.run.make import make_log, packages
from miles_core.run.prepare import set_environment
from miles_core.run.stopping import Deadline

if TYPE_CHECKING:
    from rich.console import Console

    from miles_core.config.config import Config
    from miles_core.plugin.plan import Plan

log = logging.getLogger(__name__)

#: Errors that a plugin may cause by changing the model, and the hooks that change it.
_OF_THE_MODEL = (CheckpointError, MismatchError, NonFiniteError, SyncError)
_CHANGING = ("on_model", "on_batch", "wrap_forward", "wrap_loss", "wrap_weights")
#: Signals that stop a run at its last completed step.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Launched:
    """A run that has ended.

    Attributes:
        run: the run.
        parts: the released parts of each policy; empty if the run ended before building them.
        ending: the summary that the last log lines of the run show.
        signal: the number of the signal that stopped the run; 0 if it finished.
    """

    run: Run
    parts: list[PolicyParts]
    ending: Ending
    signal: int = 0


def launch(config: Config, plan: Plan, manifests: Mapping[str, Plugin], console: Console | None = None) -> Launched:
    """Run the training loop and return when it ends. Also works inside a running event loop, such as a notebook's.

    Args:
        config: effective configuration, with the plan's ``sets`` applied.
        plan: the accepted plan.
        manifests: every known manifest by name.
        console: destination of live output; standard error by default.

    Raises:
        MilesError: everything wrong with the inputs, reported before anything is built; or the error that ended the run, whose
            notes name the location of the last completed step.
    """
    with claim_directory(config) as directory:
        set_environment(plan)
        with logs.hold_records() as records:  # a start that is refused leaves no log file
            run, inputs = check_inputs(config, plan, manifests, directory)
        load = config.run.load
        resume_from = locate_checkpoint(load, plan.record()) if load is not None else None
        console = logs.configure(config.run.log_level, directory, console, packages(plan, manifests))
        previous = _write_start(run)
        _log_start(plan, directory, resume_from)
        logs.release_records(records)
        start = checkpoint_step(resume_from) if resume_from else None
        if resume_from and start is not None and is_complete(run, resume_from):
            run.step = start
            _restore(previous)
            return Launched(run, [], _log_ending(run, "finished"))
        progress = TerminalProgress(config.rollout.num_rollout, console, start or 0)
        with _record_error(run, previous, start or 0):  # a sink that cannot be reached
            run_log = make_log(run, manifests, progress, start)
        seed_generators(config.train.seed)
        with handle_signals(run) as stopped, report_exits(lambda what: _report_exit(run, what)):
            try:
                with _record_error(run, previous), run_log.progress:
                    try:
                        parts = _run_coroutine(stopped.deadline.limit(train(run, run_log, inputs, resume_from)))
                    finally:
                        run_log.close()
            except OutOfTime as late:
                log.warning("%s", late)
                parts = []
        end = _log_ending(run, f"stopped by {stopped.name}" if stopped.name else "finished")
        return Launched(run, parts, end, stopped.signals[-1] if stopped.signals else 0)


def _run_coroutine(coroutine: Coroutine[Any, Any, list[PolicyParts]]) -> list[PolicyParts]:
    """Run a coroutine to completion, in another thread if this thread already runs an event loop."""

    def run() -> list[PolicyParts]:
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(DaemonExecutor())
            return runner.run(coroutine)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


class StopSignals:
    """The stop signals that a run received, in order, and the deadline that SIGTERM starts."""

    def __init__(self, run: Run) -> None:
        self.run, self.signals = run, list[signal.Signals]()
        self.deadline = Deadline(run.config.run.stop_within, self._exit)

    @property
    def name(self) -> str | None:
        """The name of the last signal; None without a signal."""
        return self.signals[-1].name if self.signals else None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first requests a stop, a second Ctrl-C exits at once."""
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
        """Log the last lines of the run before the process exits at its deadline."""
        log.error(
            "the run did not stop in time: the process exits %g s after %s", self.run.config.run.stop_within, self.name
        )
        _log_ending(self.run, f"stopped by {self.name}")


@contextmanager
def handle_signals(run: Run) -> Iterator[StopSignals]:
    """Install signal handlers for the duration of a run.

    The first Ctrl-C, SIGTERM or SIGHUP stops the run at the last completed step, SIGTERM within ``--stop-within`` seconds. A second
    Ctrl-C exits at once. A signal that the process already ignores (``nohup``) stays ignored.

    Yields the received signals. Outside the main thread no handlers are installed.
    """
    stopped = StopSignals(run)
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
    """Redirect terminal output to ``/dev/null`` after the terminal has closed, so that writing to it does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.dup2(nowhere, descriptor)


def _log_start(plan: Plan, directory: Path, resume_from: Path | None) -> None:
    """Log what the run consists of, and what differs from the checkpoint that it continues."""
    log.info("%s", plan.header)
    for line in list_notices(plan):
        log.info("%s", line)
    log.info("run directory: %s", directory)
    for change in changes(resume_from, plan.record()) if resume_from else ():
        own = (
            "; the weights that are trained are those of the checkpoint" if change.name == "model.hf_checkpoint" else ""
        )
        log.warning("continuing with a change: %s%s", change, own)


def _write_start(run: Run) -> dict[Path, bytes]:
    """Write the configuration, the plan and the environment to the run directory; return the previous contents of the first two."""
    files = [run.directory / "config.yaml", run.directory / "plan.json"]
    try:
        previous = {file: file.read_bytes() for file in files if file.is_file()}
        (run.directory / ENDING).unlink(missing_ok=True)  # how an earlier process of this run ended
        files[0].write_text(redact(run.config.to_yaml()), encoding="utf-8")
        files[1].write_text(json.dumps(run.plan.record()), encoding="utf-8")
        write_environment(run.directory)
        return previous
    except OSError as error:
        raise ConfigError(
            f"--save {run.directory}: {error.filename or 'a file in it'} cannot be written ({error.strerror}); free space there, or choose another "
            "directory"
        ) from error


def _restore(previous: Mapping[Path, bytes]) -> None:
    """Write the saved options back: no step was trained with those that replaced them, which may not fit the checkpoint."""
    with suppress(OSError):  # of a full disk, which the run's error reports
        for file, content in previous.items():
            file.write_bytes(content)


@contextmanager
def _record_error(run: Run, previous: Mapping[Path, bytes], step: int | None = None) -> Iterator[None]:
    """Log and record an error that ends the run; ``step`` is the number of steps if ``run`` has no count yet. ``SystemExit`` and
    ``BrokenPipeError`` are converted, because the command line would treat them as an ordinary exit. If the checkpoint was not loaded, for
    example because changed options do not fit it, the ``previous`` files are restored, so that ``--load`` alone repeats the saved options."""
    try:
        yield
    except (Exception, SystemExit) as caught:
        error: Exception
        if isinstance(caught, SystemExit):
            what = f"code of the run called sys.exit({caught.code!r})"
            error = PluginError(f"{what} ({locate_error(caught)}); raise an error instead")
        elif isinstance(caught, BrokenPipeError):
            error = PluginError(f"the other end of a pipe or connection is closed ({locate_error(caught)})")
        else:
            error = caught
        run.step = run.step if step is None else step
        if not run.started:
            _restore(previous)
        log.error("the run ended", exc_info=caught, extra=logs.FILE_ONLY)
        of_the_model = isinstance(error, _OF_THE_MODEL) and not isinstance(error.__cause__, OSError)  # of the disk
        if not isinstance(error, MilesError) or of_the_model:
            run.hooks.name_suspects(error, _CHANGING)
        first, *rest = record_ending(run, f"ended by {type(error).__name__}: {error}").lines()
        for line in (first, *rest):
            log.error("%s", line, extra=logs.FILE_ONLY)
        error.add_note("\n".join(rest))
        if error is caught:
            raise
        raise error from caught


def _log_ending(run: Run, why: str) -> Ending:
    """Record the end of a run and log its last lines."""
    end = record_ending(run, why)
    if idle := find_untrained(run):
        log.warning("%s", idle)
    for line in end.lines():
        log.info("%s", line)
    return end


def _report_exit(run: Run, what: str) -> None:
    """Log the last lines of a run if a function exits the process immediately."""
    error = PluginError(f"code of the run ended the process: {what}; raise an error instead")
    log.error("%s", error)
    for line in record_ending(run, f"ended by {type(error).__name__}: {error}").lines():
        log.error("%s", line)
