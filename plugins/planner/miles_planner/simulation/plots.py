"""The plot of one or several simulations: seconds per step, use of the GPUs, requests over time and staleness."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError
from miles_planner.simulation.simulation import Simulated
from miles_tools.report.plots import INK, PALETTE, TITLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Height of a row of panels in inches, and the width of the figure.
HEIGHT, WIDTH = 3.1, 11.0
#: Panels of the first row: title -> metrics of the summary.
PANELS = {
    "seconds per step": ("seconds_per_step",),
    "busy: engines, trainer (pale)": ("engine_busy", "trainer_busy"),
    "staleness: mean, maximum (pale)": ("staleness_mean", "staleness_max"),
}


def draw(results: Sequence[Simulated], path: Path) -> None:
    """Draw the results to a file, whose suffix is its format.

    Raises:
        ConfigError: matplotlib cannot write such a file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT * (1 + len(results))), layout="constrained")
    grid = figure.add_gridspec(1 + len(results), 3)
    names = [result.name for result in results]
    colors = [color for color, _ in zip(cycle(PALETTE), results, strict=False)]
    summaries = [result.summary() for result in results]
    for column, (title, metrics) in enumerate(PANELS.items()):
        axes = figure.add_subplot(grid[0, column])
        _bars(axes, names if not column else [""] * len(names), colors, [[s[m] for m in metrics] for s in summaries])
        _style(axes, title)
    for row, (name, result, color) in enumerate(zip(names, results, colors, strict=True), 1):
        axes = figure.add_subplot(grid[row, :])
        _over_time(axes, result, color)
        _style(axes, f"{name}: requests decoded; shaded while the trainer trains")
    try:
        figure.savefig(path, dpi=110)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {path}: {error}; give a path that ends in .png, .svg or .pdf") from error


def _bars(axes: Axes, names: Sequence[str], colors: Sequence[str], values: Sequence[Sequence[float]]) -> None:
    """Draw one bar per simulation and value; the second value of a simulation is paler."""
    for place, (row, color) in enumerate(zip(values, colors, strict=True)):
        height = 0.8 / len(row)
        for number, value in enumerate(row):
            at = place + (number - (len(row) - 1) / 2) * height
            axes.barh(at, value, 0.9 * height, color=color, alpha=1 - 0.5 * number)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _over_time(axes: Axes, result: Simulated, color: str) -> None:
    times, values = zip(*result.running, strict=True)
    axes.plot(times, values, drawstyle="steps-post", color=color, linewidth=1)
    for (start, on), (end, _) in pairwise(result.training):
        if on:
            axes.axvspan(start, end, color=PALETTE[1], alpha=0.15, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, result.steps[-1].at)
    axes.set_xlabel("virtual seconds", fontsize=9, color=INK)


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", **TITLE)
    axes.tick_params(labelsize=9, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
