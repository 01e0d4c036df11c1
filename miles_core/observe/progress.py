"""Progress a person can watch: bars on a terminal, one line a step elsewhere.

On a terminal two bars live at the bottom and the log scrolls above them: steps (with reward, response length, time a
step and what remains) and, below, the samples of the rollout in progress or the name of the current phase. In a file, a
CI log or under nohup, a line is logged for each of the first steps and then as often as ``every`` says.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars, TaskID

log = logging.getLogger(__name__)

#: What a step's line shows, in this order: metric -> (label, format). Others are in metrics.jsonl.
SHOWN = {
    "reward/mean": ("reward", "{:.3f}"),
    "eval/accuracy": ("eval", "{:.1%}"),
    "rollout/length_mean": ("length", "{:.1f}"),
    "train/loss": ("loss", "{:.4f}"),
    "mismatch/kl_k3": ("mismatch", "{:.2g}"),
    "train/grad_norm": ("grad", "{:.2g}"),
}
#: On the bar there is room for these.
ON_BAR = ("reward/mean", "eval/accuracy", "rollout/length_mean")
#: Steps the remaining time is estimated from.
WINDOW = 20


class Progress:
    """Shows one run's steps. A context manager.

    Args:
        total: the step the run ends at.
        console: the console ``miles_core.observe.log.configure`` returned.
        start: the step it starts from (resume).
        every: seconds between two lines where there is no terminal; the first 3 steps, the last, and a step with an
            evaluation are always logged.
    """

    def __init__(self, total: int, console: Console | None = None, start: int = 0, every: float = 10.0) -> None:
        self.total = total
        self.done = start
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

    def watch(self, activity: Callable[[], Mapping[str, int]]) -> None:
        """Show live beside the bar of the phase how many calls each worker has to answer, where there are workers."""
        self._activity = activity

    def __enter__(self) -> Progress:
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
        """The first step begins: what came before is no part of its time."""
        self._last_step = time.monotonic()

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase of the step begins; ``total`` items (samples, batches) are expected in it, if that is known."""
        log.debug("step %d: %s%s", self.done + 1, name, f" ({total})" if total else "")
        if self._bars is not None:
            self._bars.reset(self._work, total=total, description=name, visible=True, text="")

    def advance(self, count: int = 1) -> None:
        """``count`` more items of the phase are finished."""
        if self._bars is not None:
            self._bars.advance(self._work, count)

    def step(self, metrics: Mapping[str, float], done: int | None = None) -> None:
        """A step is complete: show its metrics. ``done`` sets the number of completed steps, else it goes up by one."""
        now = time.monotonic()
        took, self._last_step = now - self._last_step, now
        before, self.done = self.done, self.done + 1 if done is None else done
        if self.done > before:  # what comes before the first step (warm start, evaluation) tells nothing about pace
            self._durations.append(took)
        self._shown |= {name: metrics[name] for name in SHOWN if name in metrics}
        if self._bars is not None:
            text = _brief({k: v for k, v in self._shown.items() if k in ON_BAR})
            eta = _duration(self.remaining()) if self._durations else "?"
            self._bars.update(self._steps, completed=self.done, text=f"{text}  {took:.2f} s  eta {eta}")
            log.debug("%s", self.line(metrics, took))
            return
        always = self.done - self.first <= 3 or self.done >= self.total or "eval/accuracy" in metrics
        if always or now - self._last_line >= self.every:
            self._last_line = now
            log.info("%s", self.line(metrics, took))

    def remaining(self) -> float:
        """Seconds the remaining steps take at the median pace of the last ones; 0 before the first."""
        if not self._durations:
            return 0.0
        pace = sorted(self._durations)[len(self._durations) // 2]
        return pace * max(self.total - self.done, 0)

    def line(self, metrics: Mapping[str, float], took: float) -> str:
        """The step in one line: number, metrics, seconds it ``took`` and those by phase, time that remains."""
        seconds = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/") and k != "time/step"}
        phases = " ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        parts = [
            f"step {self.done}/{self.total}",
            _brief({k: metrics[k] for k in SHOWN if k in metrics}),
            f"{took:.2f} s" + (f" ({phases})" if phases else ""),
            f"eta {_duration(self.remaining())}" if self._durations and self.done < self.total else "",
        ]
        return "  ".join(part for part in parts if part)


def _brief(metrics: Mapping[str, float]) -> str:
    return "  ".join(
        f"{label} {form.format(metrics[name])}" for name, (label, form) in SHOWN.items() if name in metrics
    )


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _bars(console: Console, activity: Callable[[], Mapping[str, int]]) -> Bars:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bars, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Workers(ProgressColumn):
        """On the bar of the phase: each worker and its calls, the idle ones dim."""

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
