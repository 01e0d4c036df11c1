"""Shared by the scripts here: paced worker processes, medians, what ran where, and the dated result file."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol, TextIO

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Worker:
    """A process that runs one turn per request and reports one JSON object per turn.

    Two libraries measured in turns, each in a process of its own, see the same machine: a slow minute slows both.

    Args:
        wait: return when the process is ready. Otherwise it starts in the background until its ``hello`` is read.
        path: import path of the process, after the checkout (default: this process's PYTHONPATH).
        log: file for what the process prints (default: this process's standard error).
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        threads: int,
        wait: bool = True,
        path: str | None = None,
        log: Path | None = None,
    ) -> None:
        self.name = name
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "") if path is None else path]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("wb") if log else nullcontext() as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        if wait:
            _ = self.hello

    @cached_property
    def hello(self) -> dict[str, Any]:
        """Wait until the process is ready; its first report."""
        return self._read()

    def turn(self) -> dict[str, Any]:
        """Let it do one turn; its report."""
        _ = self.hello  # the first report, which is not a turn's
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # reading its answer then tells that it has ended
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        return self._read()

    def close(self, patience: float = 0.0) -> None:
        """End it. patience: seconds in which it may end its own processes when its standard input is closed."""
        if patience:
            with suppress(subprocess.TimeoutExpired, BrokenPipeError):
                self.process.communicate(timeout=patience)  # closes its standard input
        self.process.kill()
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"benchmark worker {self.name} ended with exit code {self.process.wait()}; see above")
        return dict(json.loads(line))


class Reporter:
    """The worker's end: stdout carries reports only, whatever else prints goes to stderr.

    Args:
        pipes: of a worker's Reporter, for a process that the worker started and that takes its turns instead (Linux).
    """

    def __init__(self, pipes: tuple[str, str] | None = None) -> None:
        self._requests: TextIO = sys.stdin
        if pipes is not None:
            self._requests = os.fdopen(os.open(pipes[0], os.O_RDONLY))
            self._out = os.fdopen(os.open(pipes[1], os.O_WRONLY), "w")
            return
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    @property
    def pipes(self) -> tuple[str, str]:
        """Where another process of this machine finds the requests and writes the reports."""
        return f"/proc/{os.getpid()}/fd/0", f"/proc/{os.getpid()}/fd/{self._out.fileno()}"

    def send(self, **report: Any) -> None:
        """Answer a turn (or say hello)."""
        self._out.write(json.dumps(report) + "\n")
        self._out.flush()

    def wait(self) -> None:
        """Wait for the next request; the process ends when standard input is closed."""
        if not self._requests.readline():
            os._exit(0)


class Steps:
    """A worker's turn of several steps, each timed. A first step that is not counted brings the process's data back into the
    processor's caches, which the others' turns have emptied: a run's steps follow one another.

    Args:
        reporter: where the turn's means go.
        count: counted steps a turn.
        uncounted: number of warm-up steps at the start of each turn; 0 if this is the only process.
    """

    def __init__(self, reporter: Reporter, count: int, uncounted: int = 1) -> None:
        self.reporter, self.count, self.uncounted = reporter, count, uncounted
        self._done: list[dict[str, float]] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the next step is that of another turn."""
        return self._done is None

    def wait(self) -> None:
        """Before each step: until it may start."""
        if self._done is None:
            self.reporter.wait()
            self._done = []

    def report(self, **numbers: float) -> None:
        """After each step."""
        assert self._done is not None
        self._done.append(numbers)
        if len(self._done) == self.uncounted + self.count:
            counted = self._done[self.uncounted :]
            self._done = None
            self.reporter.send(**{name: statistics.fmean(step[name] for step in counted) for name in counted[0]})


class Side(Protocol):
    """One of several compared programs that run alternately: a ``Worker``, or a new process for each turn."""

    name: str

    def turn(self) -> dict[str, Any]: ...


def alternate(
    workers: Sequence[Side],
    turns: int,
    warm_up: int,
    note: Callable[[dict[str, list[dict[str, Any]]]], None] = lambda _: None,
) -> dict[str, list[dict[str, Any]]]:
    """``turns`` measured turns of each, A B B A ..., after ``warm_up`` unmeasured ones; ``note`` receives the reports after each turn."""
    reports: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    for number in range(warm_up + turns):
        for worker in workers[::-1] if number % 2 else workers:
            report = worker.turn()
            if number >= warm_up:
                reports[worker.name].append(report)
        shown = "  ".join(f"{w.name} {reports[w.name][-1]['seconds']:.3f} s" for w in workers if reports[w.name])
        print(f"turn {number + 1}/{warm_up + turns}  {shown or 'warm-up'}", file=sys.stderr, flush=True)
        if number >= warm_up:
            note(reports)
    return reports


def medians(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of every number the reports share."""
    names = [n for n in reports[0] if all(n in r for r in reports)]
    return {name: round(statistics.median(r[name] for r in reports), 4) for name in names}


def median_interval(values: Sequence[float]) -> list[float]:
    """The order statistics that hold the median in 95 % of samples (normal approximation of the binomial)."""
    ordered = sorted(values)
    reach = 1.96 * math.sqrt(len(ordered)) / 2
    low, high = math.floor(len(ordered) / 2 - reach), math.ceil(len(ordered) / 2 + reach)
    return [ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]]


def spread(reports: Sequence[Mapping[str, float]]) -> list[float]:
    """Smallest and largest seconds."""
    seconds = [r["seconds"] for r in reports]
    return [round(min(seconds), 4), round(max(seconds), 4)]


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (default: all cores)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME-DATE.json")
    return parser


def finish(
    name: str,
    result: Mapping[str, Any],
    save: bool,
    versions: Callable[[], dict[str, str]],
    variant: str = "",
    quiet: bool = False,
) -> None:
    """Print the result as one JSON line, and save it with where it comes from when asked to.

    ``variant``: told apart in the file's name, as in another device. ``quiet``: print nothing; for a result that is not complete yet."""
    record = {
        "benchmark": name,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "command": " ".join(
            ["python", shorten_path(str(Path(sys.argv[0]).resolve())), *map(shorten_path, sys.argv[1:])]
        ),
        "hardware": hardware(),
        "python": platform.python_version(),
        "versions": versions(),
        **result,
    }
    if save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}-{record['date']}{variant and '-' + variant}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        new.replace(path)  # a killed process leaves the earlier result
        if not quiet:
            print(f"saved {path.relative_to(ROOT)}", file=sys.stderr)
    if not quiet:
        print(json.dumps(record), flush=True)


def shorten_path(argument: str) -> str:
    """Replace an absolute path in a command-line argument, which means nothing on other machines, by the path in this checkout or its last name."""
    flag, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    return flag + equals + (str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name)


def installed(*names: str) -> dict[str, str]:
    """Versions of distributions in this interpreter; of packages on PYTHONPATH without metadata, what they call their version."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return str(getattr(import_module(name), "__version__", "unknown"))


def hardware() -> str:
    """Processor and number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.processor())
    return f"{model}, {os.cpu_count()} cores"


def commit(root: Path = ROOT) -> str:
    """A checkout's commit, marked when files of its packages differ from it."""
    head = _git(root, "rev-parse", "--short", "HEAD")
    parts = ("miles_*", "plugins", "benchmarks/*.py")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *parts)
    return (head or "unknown") + ("+changes" if changed else "")


def _git(root: Path, *words: str) -> str:
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=root, check=False).stdout.strip()
    except FileNotFoundError:  # no git on this machine
        return ""
