"""The data of the page's plots: which plots there are, and their lines with bands, down-sampled.

Runs whose options differ only in seeds (and in where they write, ``PLACES``) form a group: one line with their mean and a band from the lowest to
the highest. With one group, a plot has all lines of its panel; with several groups, one plot per metric has a line per group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miles_core.observe.metrics import series
from miles_core.plugin.panel import Panel
from miles_tools.report.grids import find_grids
from miles_tools.report.plots import moves, panels, without_huge, without_warm_start
from miles_tools.report.reading import PLACES, RunReader, options_of

#: Maximum number of points of a line. More steps are joined: a point is their mean, and its band goes from the lowest to the highest.
POINTS = 600
#: Number of plots under the first heading.
OVERVIEW = 3


@dataclass(frozen=True)
class Group:
    """Runs that differ only in seeds. ``label``: the options in which it differs from other groups, or the name of its only run."""

    label: str
    runs: Sequence[RunReader]


def versions(run: RunReader) -> dict[str, str]:
    """Return plugin -> version, from the plan of a run."""
    plugins = run.plan.get("plugins") or ()
    return {f"version of {p.get('name')}": str(p.get("version")) for p in plugins if isinstance(p, Mapping)}


def list_differences(runs: Sequence[RunReader]) -> list[tuple[str, list[str]]]:
    """Return (option, its value in each run) for options and versions of plugins that differ; "-" where a run has none."""
    found = [{n: str(v) for n, v in options_of(run.config).items()} | versions(run) for run in runs]
    rows = [(name, [each.get(name, "-") for each in found]) for name in sorted({n for each in found for n in each})]
    return [(name, values) for name, values in rows if len(set(values)) > 1 and name not in ("run.save", "run.load")]


def group_runs(runs: Sequence[RunReader]) -> list[Group]:
    """Return the groups in the order of their first runs."""
    rows = [(name, values) for name, values in list_differences(runs) if not (name.endswith("seed") or name in PLACES)]
    members: dict[tuple[str, ...], list[RunReader]] = {}
    for number, run in enumerate(runs):
        members.setdefault(tuple(values[number] for _, values in rows), []).append(run)
    groups = []
    for values, found in members.items():
        options = ", ".join(f"{name} {value}" for (name, _), value in zip(rows, values, strict=True))
        groups.append(Group(found[0].label if len(found) == 1 else options[:60] or f"{len(found)} seeds", found))
    return groups


def make_sections(runs: Sequence[RunReader], declared: Sequence[Panel]) -> list[dict[str, Any]]:
    """Return the plots under their headings, in the order of the page, as JSON types.

    Args:
        runs: the runs, refreshed.
        declared: the panels of all installed plugins.
    """
    records = [record for run in runs for record in run.records]
    chosen = panels(records, [panel for panel in declared if panel.kind != "grid"])
    groups = group_runs(runs)
    columns = {id(run): _Columns(run) for run in runs}
    sections: dict[str, list[dict[str, Any]]] = {}
    still = []
    for panel in chosen if len(groups) == 1 else _split(chosen):
        plot = _make_plot(panel, groups, columns)
        if moves(panel, records):
            sections.setdefault(panel.section, []).append(plot)
        else:
            still.append(plot)
    for section, plot in _make_grids(runs, declared):
        sections.setdefault(section, []).append(plot)
    own, more = sections.pop("", []), sections.pop("More metrics", [])
    found = [("Overview", own[:OVERVIEW], False), ("Training", own[OVERVIEW:], False)]
    found += [(f"Plugin {name}", plots, False) for name, plots in sections.items()]
    found += [("More metrics", more, True), ("Metrics that did not change", still, True)]
    return [{"title": title, "plots": plots, "folded": folded} for title, plots, folded in found if plots]


def _make_grids(runs: Sequence[RunReader], declared: Sequence[Panel]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (section, plot) for each grid in the directories of the runs."""
    for run in runs:
        for panel, grid in find_grids(run.directory, declared):
            title = panel.title if len(runs) == 1 else f"{panel.title} · {run.label}"
            name = f"{run.label}:{panel.name}"
            yield panel.section, {"name": name, "title": title, "unit": panel.unit, "kind": "grid", "grid": grid}


def _split(chosen: Iterable[Panel]) -> list[Panel]:
    """Divide panels of several metrics: one panel for each."""
    found = []
    for panel in chosen:
        for metric, label in panel.lines.items():
            title = panel.title if len(panel.lines) == 1 else f"{panel.title}: {label}"
            name = panel.name if len(panel.lines) == 1 else f"{panel.name}:{metric}"
            found.append(replace(panel, name=name, title=title, lines={metric: label}, kind="line", band=""))
    return found


class _Columns:
    """The metrics of a run by name; each is looked up once."""

    def __init__(self, run: RunReader) -> None:
        self.run = run
        self._known: dict[str, dict[int, float]] = {}

    def __call__(self, metric: str) -> dict[int, float]:
        """Return step -> value; values that are not finite are NaN."""
        if metric not in self._known:
            steps, values = without_huge(*without_warm_start(metric, *series(self.run.records, metric)))
            self._known[metric] = dict(zip(steps, values, strict=True))
        return self._known[metric]


def _make_plot(panel: Panel, groups: Sequence[Group], columns: Mapping[int, _Columns]) -> dict[str, Any]:
    """Return a plot: ``x`` steps; ``lines`` with ``mid``, ``low`` and ``high`` at these steps (null without a value); ``each``, the
    lines of single runs; ``bad``, steps with a value that is not finite."""
    asked = [(metric, label, group) for metric, label in panel.lines.items() for group in groups]
    tables = [[columns[id(run)](metric) for run in group.runs] for metric, _, group in asked]
    steps = sorted({step for runs in tables for table in runs for step in table})
    size = max(1, math.ceil(len(steps) / POINTS))
    buckets = [steps[start : start + size] for start in range(0, len(steps), size)]
    several = len(groups) > 1
    lines, each = [], []
    for number, ((metric, label, group), runs) in enumerate(zip(asked, tables, strict=True)):
        mid, low, high = _join(runs, buckets)
        if number == 0 and panel.band and len(group.runs) == 1 and size == 1:
            low, high = _spread(columns[id(group.runs[0])], metric, panel.band, steps)
        lines.append(
            {"label": group.label if several else label, "mid": mid, "low": low, "high": high}
            | {"marked": metric in panel.marked}
        )
        if len(group.runs) > 1:
            for run, table in zip(group.runs, runs, strict=True):
                each.append({"label": run.label, "line": number, "mid": _join([table], buckets)[0]})
    return {
        "name": panel.name,
        "title": panel.title,
        "unit": panel.unit,
        "kind": panel.kind,
        "log": panel.log,
        "percent": panel.percent,
        "x": [bucket[len(bucket) // 2] for bucket in buckets],
        "lines": lines,
        "each": each,
        "bad": sorted({step for runs in tables for table in runs for step, v in table.items() if math.isnan(v)})[:50],
    }


Numbers = list[float | None]


def _join(
    tables: Sequence[Mapping[int, float]], buckets: Sequence[Sequence[int]]
) -> tuple[Numbers, Numbers | None, Numbers | None]:
    """Return mean, lowest and highest of the runs in each bucket; None for both if no bucket joins values."""
    mid: Numbers = []
    low: Numbers = []
    high: Numbers = []
    joined = False
    for bucket in buckets:
        values = [table[step] for table in tables for step in bucket if step in table and not math.isnan(table[step])]
        joined = joined or len(values) > 1
        mid.append(_round(math.fsum(values) / len(values)) if values else None)
        low.append(_round(min(values)) if values else None)
        high.append(_round(max(values)) if values else None)
    return (mid, low, high) if joined else (mid, None, None)


def _spread(columns: _Columns, metric: str, spread: str, steps: Sequence[int]) -> tuple[Numbers | None, Numbers | None]:
    """Return the limits of a band of ± one ``spread`` around a metric, within the observed range of rewards."""
    values, widths = columns(metric), columns(spread)
    floor = min(columns("reward/min").values(), default=-math.inf)
    ceiling = max(columns("reward/max").values(), default=math.inf)
    low: Numbers = []
    high: Numbers = []
    for step in steps:
        value, width = values.get(step, math.nan), widths.get(step, math.nan)
        known = not math.isnan(value + width)
        low.append(_round(max(value - width, floor)) if known else None)
        high.append(_round(min(value + width, ceiling)) if known else None)
    return (low, high) if sum(v is not None for v in low) > 1 else (None, None)


def _round(value: float) -> float:
    return float(f"{value:.5g}")
