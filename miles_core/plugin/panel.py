"""A plot of the report, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        name: file name without suffix.
        title: above the plot.
        lines: metric -> label in the legend. In a plugin's panel a metric may be a pattern with one ``*``, whose place in the label
            takes what it stands for; without the first line's metrics there is no such panel.
        unit: y-axis label.
        section: heading it stands under; empty is the main section.
        kind: ``line``, or ``stack`` for parts that add up.
        log: logarithmic y axis where all values are positive and span more than a factor of 20.
        percent: values are fractions, shown as percentages.
        band: metric that is drawn as a band around the first line (a standard deviation).
        marked: metrics measured only now and then, drawn with markers.
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
