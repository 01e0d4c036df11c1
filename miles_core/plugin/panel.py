"""Declaration of a plot in the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        name: file name without suffix.
        title: title above the plot.
        lines: metric -> label in the legend. In a plugin's panel, a metric may be a pattern with one ``*``; a ``*`` in the label is
            replaced by the matching text. The panel is omitted if no metric matches the first line.
        unit: y-axis label.
        section: heading of the plot; empty is the main section.
        kind: ``line``; ``stack`` for values that add up; or ``grid``, a heat map of values in a file of the run directory, whose name (a
            pattern) takes the place of a metric in ``lines`` (format: ``miles_tools.report.grids``).
        log: use a logarithmic y axis if all values are positive and span more than a factor of 20.
        percent: show the values, which are fractions, as percentages.
        band: metric drawn as a band around the first line (a standard deviation).
        marked: metrics that are not measured at every step, drawn with markers.
    """

    name: str
    title: str
    lines: Mapping[str, str]
    unit: str = ""
    section: str = ""
    kind: str = "line"
    log: bool = False
    percent: bool = False
    band: str = ""
    marked: frozenset[str] = field(default_factory=frozenset)
