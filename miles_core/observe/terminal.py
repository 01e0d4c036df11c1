"""Live progress of a run: bars on a terminal, otherwise one line per step.

A terminal shows two bars below the scrolling log: the steps (with reward, response length, time per step and remaining time), and the
samples of the current rollout or the name of the current phase. In a file, a CI log or under nohup, each of the first steps logs a
line, later steps and the progress within a phase at intervals of at least ``every`` seconds.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from miles_core.observe.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

log = logging.getLogger(__name__)

#: Metrics in a step's line, in this order: metric -> (label, format, width). All metrics are in metrics.jsonl. Evaluations come last: not
#: every step has one, and the columns before them keep their places.
SHOWN = {
    "reward/mean": ("reward", "{:.3f}", 6),
    "rollout/length_mean": ("length", "{:.1f}", 7),
    "train/loss": ("loss", "{:.4f}", 8),
    "mismatch/kl_k3": ("mismatch", "{:.2g}", 7),
    "train/grad_norm": ("grad", "{:.2g}", 7),
    "eval/accuracy": ("eval", "{:.1%}", 6),
    "eval/reward": ("eval reward", "{:.3f}", 6),
}
#: Metrics on the bar, which has less space.
ON_BAR = ("reward/mean", "eval/accuracy", "eval/reward", "rollout/length_mean")
#: Seconds after which the end of a phase is estimated.
_LONG_PHASE = 2.0
#: Number of recent steps from which the remaining time is estimated.
WINDOW = 20


class TerminalProgress(Progress):
    """Shows one run's steps on a terminal or in its log.

    Args:
        total: number of the last step.
        console: the console returned by ``miles_core.observe.log.configure``.
        start: number of completed steps at the start (resume).
        every: minimum seconds between two lines without a terminal; the first 3 steps, the last, and steps with an evaluation are
            always logged.
    """

    def __init__(self, total: int, console: Console | None = None, start: int = 0, every: float = 10.0) -> None:
        super().__init__(total, start)
        self.first = start
        self.every = every
        self._console = console
        self._bars: Bars | None = None
        self._steps: TaskID
        self._work: TaskID
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._last_step = self._last_line = time.monotonic()
        self._shown: dict[str, float] = {}
        self._activity: Callable[[], Mapping[str, int]] = dict
        self._phase, self._items, self._finished, self._began = "", 0, 0, time.monotonic()

    def watch(self, activity: Callable[[], Mapping[str, int]]) -> None:
        """Show the number of calls in flight at each worker next to the phase's bar."""
        self._activity = activity

    def __enter__(self) -> TerminalProgress:
        self._last_step = self._last_line = time.monotonic()
        if self._console is not None and self._console.is_terminal:
            self._bars = _bars(self._console, lambda: self._activity())
            self._steps = self._bars.add_task("step", total=self.total, completed=self.done, text="")
            self._work = self._bars.add_task("", total=None, text="", visible=False)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.update(self._work, visible=False)
            self._bars.stop()
            self._bars = None

    def begin(self) -> None:
        """Start timing the first step; earlier time is not counted."""
        self._last_step = time.monotonic()

    def phase(self, name: str, total: int | None = None) -> None:
        """Start a phase of the step with ``total`` expected items (samples, batches); None if unknown."""
        log.debug("step %d: %s%s", self.done + 1, name, f" ({total})" if total else "")
        self._phase, self._items, self._finished, self._began = name, total or 0, 0, time.monotonic()
        if self._bars is not None:
            self._bars.reset(self._work, total=total, description=name, visible=True, text="")

    def advance(self, count: int = 1) -> None:
        """Advance the phase by ``count`` finished items."""
        self._finished += count
        if self._bars is not None:
            self._bars.update(self._work, advance=count, text=self._phase_eta())
        elif self._items and time.monotonic() - self._last_line >= self.every:
            self._last_line = time.monotonic()
            left = self._phase_eta()
            log.info(
                "step %d: %s %d of %d%s",
                self.done + 1,
                self._phase,
                self._finished,
                self._items,
                f"  {left}" * bool(left),
            )

    def _phase_eta(self) -> str:
        """Return the estimated time until the phase ends, if that takes long; the first items count like the others."""
        took = time.monotonic() - self._began
        if not self._items or not 0 < self._finished < self._items or took < _LONG_PHASE:
            return ""
        return f"eta {_duration(took / self._finished * (self._items - self._finished))}"

    def step(self, metrics: Mapping[str, float], done: int | None = None) -> None:
        """Show the metrics of a completed step. ``done`` sets the number of completed steps; by default it increases by one."""
        now = time.monotonic()
        took, self._last_step = now - self._last_step, now
        before, self.done = self.done, self.done + 1 if done is None else done
        if self.done > before:  # the time before the first step (warm start, evaluation) is not representative
            self._durations.append(took)
        self._shown |= {name: metrics[name] for name in SHOWN if name in metrics}
        if self._bars is not None:
            text = _brief({k: v for k, v in self._shown.items() if k in ON_BAR})
            eta = _duration(self.estimate_remaining()) if self._durations else "?"
            self._bars.update(self._steps, completed=self.done, text=f"{text}  {took:.2f} s  eta {eta}")
            log.debug("%s", self.line(metrics, took))
            return
        always = self.done - self.first <= 3 or self.done >= self.total or "eval/accuracy" in metrics
        if always or now - self._last_line >= self.every:
            self._last_line = now
            log.info("%s", self.line(metrics, took))

    def estimate_remaining(self) -> float:
        """Return the estimated seconds for the remaining steps, from the median of recent steps; 0 before the first step."""
        if not self._durations:
            return 0.0
        pace = sorted(self._durations)[len(self._durations) // 2]
        return pace * max(self.total - self.done, 0)

    def line(self, metrics: Mapping[str, float], took: float) -> str:
        """Format a step as one line: number, metrics, duration ``took`` in seconds, durations of phases, remaining time."""
        seconds = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/") and k != "time/step"}
        phases = " ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        parts = [
            f"step {self.done:>{len(str(self.total))}}/{self.total}",
            _brief(metrics, aligned=True),
            f"{took:.2f} s" + (f" ({phases})" if phases else ""),
            f"eta {_duration(self.estimate_remaining())}" if self._durations and self.done < self.total else "",
        ]
        return "  ".join(part for part in parts if part)


def is_graded(metrics: Mapping[str, float]) -> bool:
    """Whether held-out rewards have values other than right and wrong, so that their mean differs from the accuracy."""
    return "eval/reward" in metrics and metrics["eval/reward"] != metrics.get("eval/accuracy")


def _brief(metrics: Mapping[str, float], aligned: bool = False) -> str:
    hidden = "eval/accuracy" if is_graded(metrics) else "eval/reward"
    parts = []
    for name, (label, form, width) in SHOWN.items():
        values = {label: metrics[name]} if name in metrics else _by_policy(metrics, name, label)
        if name != hidden:
            parts += [f"{label} {form.format(value):>{width if aligned else 0}}" for label, value in values.items()]
    return "  ".join(parts)


def _by_policy(metrics: Mapping[str, float], name: str, label: str) -> dict[str, float]:
    """Return the values of a metric that each of several trained policies has (``POLICY/name``), by label and policy."""
    return {f"{label} {key[: -len(name) - 1]}": value for key, value in metrics.items() if key.endswith(f"/{name}")}


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _bars(console: Console, activity: Callable[[], Mapping[str, int]]) -> Bars:
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Workers(ProgressColumn):
        """Column of the phase's bar: each worker with its number of calls; idle workers are dim."""

        def render(self, task: Task) -> Text:
            pairs = activity().items() if task.description != "step" else ()
            return Text(" ").join(Text(f"{name} {count}", style="" if count else "dim") for name, count in pairs)

    return Bars(
        TextColumn("{task.description:>8}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        Workers(),
        console=console,
        refresh_per_second=8,
    )
