"""Writes the comparison of several runs: one self-contained HTML file with the options that differ, the metrics side by side, and
plots with a line per run.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import MilesError
from miles_core.observe.metrics import names, read, series
from miles_core.plugin.panel import Panel
from miles_core.version import __version__
from miles_tools.output_file import write_file
from miles_tools.report.plots import MAIN, PALETTE, draw
from miles_tools.report.report import format_number, read_json, read_yaml, render

HTML = "compare.html"
#: Metrics with a plot, if a run has them: the lines of the report's main plots, and the time of a step.
PLOTTED = tuple(dict.fromkeys([*(name for panel in MAIN for name in panel.lines), "time/step"]))


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison.

    Attributes:
        label: the shortest end of its path that no other run has.
        options: option -> value, as in its ``config.yaml``, defaults included.
        plugins: name -> version, from its plan.
        records: its metrics.
    """

    label: str
    options: Mapping[str, str]
    plugins: Mapping[str, str]
    records: Sequence[Mapping[str, Any]]


def compare(directories: Sequence[Path | str], target: Path | str = HTML) -> Path:
    """Write the comparison of at least two runs to ``target`` and return its path.

    Raises:
        MilesError: a directory is no run directory, occurs twice, or has no metrics yet; or there are more runs than colours.
    """
    paths = [Path(directory).resolve() for directory in directories]
    if twice := next((path for i, path in enumerate(paths) if path in paths[:i]), None):
        raise MilesError(f"{twice}: this run is given twice; give different runs to compare them")
    if len(paths) > len(PALETTE):
        raise MilesError(f"{len(paths)} runs: at most {len(PALETTE)} fit into one comparison; leave some out")
    runs = [_read_run(path, label) for path, label in zip(paths, shorten_paths(paths), strict=True)]
    page = render(
        "compare.html",
        runs=[run.label for run in runs],
        paths=[str(path) for path in paths],
        options=list_differences(runs),
        metrics=list_metrics(runs),
        plots=_draw_plots(runs),
        version=__version__,
    )
    write_file(Path(target), page)
    return Path(target)


def shorten_paths(paths: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path, in whole folders, that differs between all of them."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        ends = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(ends)) == len(ends):
            return ends
    return [str(path) for path in paths]


def _read_run(directory: Path, label: str) -> ComparedRun:
    if not (directory / "metrics.jsonl").is_file():
        raise MilesError(f"{directory}: no metrics.jsonl; give run directories, the ones --save named")
    records = read(directory / "metrics.jsonl")
    if not records:
        raise MilesError(f"{directory}: this run has not completed a step yet, so there is nothing to compare")
    config = read_yaml(directory / "config.yaml")
    options = _flatten(config.pop("defaults", {})) | _flatten(config)
    plugins = {p["name"]: str(p["version"]) for p in read_json(directory / "plan.json").get("plugins", ())}
    return ComparedRun(label, options, plugins, records)


def _flatten(tables: Mapping[str, Any]) -> dict[str, str]:
    entries = ((table, values) for table, values in tables.items() if isinstance(values, Mapping))
    return {f"{table}.{name}": str(value) for table, values in entries for name, value in values.items()}


def list_differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return (option, its value in each run) for options and versions of plugins that differ; "-" where a run has none."""
    rows = []
    for name in sorted({name for run in runs for name in run.options} - {"run.save"}):
        values = [run.options.get(name, "-") for run in runs]
        rows.append((name, values))
    for plugin in sorted({name for run in runs for name in run.plugins}):
        rows.append((f"version of {plugin}", [run.plugins.get(plugin, "-") for run in runs]))
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def list_metrics(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return (metric, its last value in each run); "-" where a run has none. The metrics of plots come first."""
    found = {name for run in runs for name in names(run.records)}
    ordered = [name for name in PLOTTED if name in found] + sorted(found - set(PLOTTED))
    return [(name, [_describe_last(run, name) for run in runs]) for name in ordered]


def _describe_last(run: ComparedRun, name: str) -> str:
    steps, values = series(run.records, name)
    if not steps:
        return "-"
    step = "" if steps[-1] == run.records[-1]["step"] else f" (step {steps[-1]})"
    return f"{format_number(values[-1])}{step}"


def _draw_plots(runs: Sequence[ComparedRun]) -> list[dict[str, str]]:
    plots = []
    for metric in PLOTTED:
        lines = {f"{i}/{metric}": run.label for i, run in enumerate(runs) if has_values(run, metric)}
        if not lines:
            continue
        records = [
            {"step": record["step"], f"{i}/{metric}": record[metric]}
            for i, run in enumerate(runs)
            for record in run.records
            if metric in record
        ]
        panel = Panel(
            metric.replace("/", "-"), metric, lines, marked=frozenset(lines if metric.startswith("eval/") else ())
        )
        image = base64.b64encode(draw(panel, records)).decode()
        plots.append({"title": metric, "image": f"data:image/png;base64,{image}"})
    return plots


def has_values(run: ComparedRun, metric: str) -> bool:
    """Whether the run has a finite value of the metric."""
    return any(not math.isnan(value) for value in series(run.records, metric)[1])
