"""Grids in the report: values that a plugin wrote to a file of the run directory, drawn as a heat map.

A plugin declares ``Panel(kind="grid")`` with a pattern of file names in place of metrics. Each file is JSON:
``{"rows": label, "columns": label, "names": [label of each row], "values": [[number or null]]}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_core.errors import MilesError
from miles_core.plugin.panel import Panel
from miles_tools.report.plots import INK, open_image

#: Rows whose names are shown.
_NAMED = 16


def find_grids(run_dir: Path, declared: Iterable[Panel]) -> Iterator[tuple[Panel, dict[str, Any]]]:
    """Yield a panel and its grid for each file of a declared grid.

    Raises:
        MilesError: a file is not a valid grid.
    """
    for panel in declared:
        for file in sorted(f for pattern in panel.lines if panel.kind == "grid" for f in run_dir.glob(pattern)):
            more = file.stem.removeprefix(panel.name).strip("-_")
            title = f"{panel.title} ({more})" if more else panel.title
            try:
                yield replace(panel, name=file.stem, title=title), _check(json.loads(file.read_text()))
            except (ValueError, KeyError, TypeError) as error:
                raise MilesError(
                    f"{file} is not a grid of a report ({error}); delete it, or run the step that wrote it again"
                ) from error


def _check(grid: Any) -> dict[str, Any]:
    """Return the grid; its numbers that are not finite are None."""
    values = [[None if v is None or not math.isfinite(v) else float(v) for v in row] for row in grid["values"]]
    if len(values) != len(grid["names"]) or len({len(row) for row in values}) > 1:
        raise ValueError("values has other rows than names, or rows of several lengths")
    names = [str(name) for name in grid["names"]]
    return {"rows": str(grid["rows"]), "columns": str(grid["columns"]), "names": names, "values": values}


def draw_grid(panel: Panel, grid: Mapping[str, Any]) -> bytes:
    """Draw a grid of ``find_grids`` as a PNG image."""
    from matplotlib import rc_context

    values = [[math.nan if v is None else v for v in row] for row in grid["values"]]
    with rc_context({"text.parse_math": False}), open_image(panel.title) as (axes, png):
        image = axes.imshow(values or [[math.nan]], aspect="auto", interpolation="nearest", cmap="cividis")
        step = math.ceil(max(len(values), 1) / _NAMED)
        axes.set_yticks(range(0, len(values), step), [str(name) for name in grid["names"][::step]])
        axes.set_xlabel(grid["columns"], fontsize=9, color=INK)
        axes.set_ylabel(grid["rows"], fontsize=9, color=INK)
        bar = axes.figure.colorbar(image, ax=axes, label=panel.unit or None)
        bar.ax.tick_params(labelsize=9, colors=INK)
    return png.getvalue()
