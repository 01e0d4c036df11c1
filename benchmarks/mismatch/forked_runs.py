"""Runs of ``miles train`` in forked processes: packages are imported once, and a run that was cut goes on from its last checkpoint.

``run_all`` starts at most ``jobs`` runs at a time, ends them at a given time so that each one writes a checkpoint, and calls back while they
run, so that results of runs that are not complete can be written. With ``lead`` it stops runs that are ahead until the slowest one has caught up,
so that runs that are cut have made about equally many steps.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

#: What a run of the embedded engine and trainer imports, apart from its model.
MODULES = (
    "torch",
    "transformers",
    "safetensors.torch",
    "miles_core.launch",
    "miles_embedded",
    "miles_embedded.trainer.trainer",
)
#: Seconds in which a run that is ended finishes its step and writes its checkpoint.
GRACE = 25.0
#: Seconds between looks at the steps of runs that go in step.
PACE = 1.0


@dataclass(frozen=True)
class ForkedRun:
    """One run.

    Attributes:
        place: its directory (``--save``).
        words: its flags, without ``--save``, ``--load`` and ``--num-rollout``.
        steps: its rollouts; a complete run with the same flags goes on if they become more.
        threads: threads of PyTorch.
        product: a file that exists when the run is complete; such a run is never continued but repeated. None: counts its steps.
    """

    place: Path
    words: str
    steps: int
    threads: int = 1
    product: Path | None = None

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of its steps so far; none if they belong to other flags."""
        path = self.place / "metrics.jsonl"
        if not path.is_file() or not self._has_flags():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")[
            :-1
        ]  # the last line of a process that was killed is incomplete
        return [row for row in map(json.loads, lines) if 0 < row["step"] <= self.steps]

    def count(self) -> int:
        """Number of lines of metrics so far, which grows by one per step."""
        path = self.place / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def is_complete(self) -> bool:
        """Whether the run has made all its steps with these flags."""
        if self.product is not None:
            return self.product.is_file() and self._has_flags()
        rows = self.rows()
        return bool(rows) and rows[-1]["step"] == self.steps

    def start(self) -> BaseProcess:
        """Fork a process that makes the rest of the run."""
        more = f"--num-rollout {self.steps} --save {self.place}"
        if self.product is None and self._has_flags() and self._has_checkpoint():
            more += f" --load {self.place}"
        else:
            shutil.rmtree(self.place, ignore_errors=True)
            self.place.mkdir(parents=True)
            self._flags().write_text(self.words)
        words = ["train", *self.words.split(), *more.split()]
        process = multiprocessing.get_context("fork").Process(target=_train, args=(words, self.output(), self.threads))
        process.start()
        return process

    def output(self) -> Path:
        """What the process printed."""
        return self.place / "output.txt"

    def _flags(self) -> Path:
        return self.place / "flags.txt"

    def _has_flags(self) -> bool:
        return self._flags().is_file() and self._flags().read_text() == self.words

    def _has_checkpoint(self) -> bool:
        from miles_core.checkpoint.directory import Checkpoints

        return Checkpoints(self.place / "checkpoints").find_latest() is not None


def _train(words: list[str], output: Path, threads: int) -> None:
    """The process of a run."""
    import torch

    from miles_core.cli.main import main

    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    sys.exit(main(words))


def prepare(*modules: str) -> None:
    """Import what the runs need, with one thread: a process that has started a pool of threads cannot be forked."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    import torch

    torch.set_num_threads(1)
    for name in (*MODULES, *modules):
        import_module(name)


def run_all(
    runs: Sequence[ForkedRun],
    jobs: int,
    until: float,
    every: float = 60.0,
    report: Callable[[], None] | None = None,
    lead: int = 0,
) -> bool:
    """Make the runs that are not complete, in their order.

    Args:
        jobs: runs at a time.
        until: value of ``time.monotonic()`` at which the running ones are ended with a checkpoint; SIGTERM does the same.
        every: seconds between calls of ``report``.
        lead: steps that a running run may be ahead of the slowest one before it is stopped; 0: any number.

    Returns:
        whether all runs are complete.

    Raises:
        SystemExit: a run failed; raised when the others have ended.
    """
    waiting, running, failures = [run for run in runs if not run.is_complete()], dict[int, _Started](), list[str]()

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal until
        until = 0.0
        raise _Ended  # leaves the wait below; the wait would catch an InterruptedError

    before = signal.signal(signal.SIGTERM, end)
    reported = time.monotonic()
    try:
        while (waiting or running) and (now := time.monotonic()) < until:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                process = run.start()
                running[process.sentinel] = _Started(run, process, now)
            pace(running.values(), lead)
            wait_until(running, min(until, reported + every, now + PACE if lead else until), failures)
            if report and time.monotonic() >= reported + every:
                report()
                reported = time.monotonic()
    except _Ended:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        stop(list(running.values()))
    if failures:
        raise SystemExit("\n".join(failures))
    return all(run.is_complete() for run in runs)


class _Ended(Exception):
    """This process received SIGTERM."""


@dataclass
class _Started:
    run: ForkedRun
    process: BaseProcess
    time: float
    stopped: bool = False

    def let_run(self, go: bool) -> None:
        """Stop the process or let it continue."""
        if self.stopped == go and self.process.pid and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGCONT if go else signal.SIGSTOP)
            self.stopped = not go


def pace(running: Collection[_Started], lead: int) -> None:
    """Stop the runs that are more than ``lead`` steps ahead of the slowest one, and continue the others; 0 steps: no run is stopped."""
    if lead:
        steps = [started.run.count() for started in running]
        for started, made in zip(running, steps, strict=True):
            started.let_run(made - min(steps) <= lead)


def wait_until(running: dict[int, _Started], until: float, failures: list[str]) -> None:
    """Wait for the end of any run, at most until a time, and remove what has ended; a failure's message is added to ``failures``."""
    for sentinel in connection.wait(list(running), max(0.0, until - time.monotonic())):
        assert isinstance(sentinel, int)
        ended = running.pop(sentinel)
        ended.process.join()
        name, code = ended.run.place.name, ended.process.exitcode
        print(f"{name} {time.monotonic() - ended.time:.0f} s, exit {code}", file=sys.stderr, flush=True)
        if code:
            failures.append(f"{name} failed:\n{ended.run.output().read_text(errors='replace')[-2000:]}")


def stop(running: Sequence[_Started]) -> None:
    """End runs: each finishes its step and writes a checkpoint, or is killed after ``GRACE`` seconds."""
    for started in running:
        started.process.terminate()
        started.let_run(True)
    end = time.monotonic() + GRACE
    for started in running:
        started.process.join(max(0.0, end - time.monotonic()))
        if started.process.is_alive():
            started.process.kill()
            started.process.join()
        rows = started.run.rows()
        print(f"{started.run.place.name} ended after {len(rows)} steps", file=sys.stderr, flush=True)
