"""Two plots of the gap between engine and trainer: by token, and by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np

from miles_tools.report.plots import FAINT, INK, PALETTE, add_grid, open_image

#: Inches.
_WIDTH = 6.4
#: Characters of a line of a cause's name, which would otherwise leave no room for the bars.
_CAUSE = 36
#: Smaller differences are FP32 rounding and share one bin.
_FLOOR = 1e-7


def draw_gap(engine: Sequence[np.ndarray], trainer: Sequence[np.ndarray], tolerance: float) -> bytes:
    """Draw a histogram of \\|delta\\| over tokens with mean and tolerance, as PNG. Arguments as for ``gap.measure``."""
    delta = np.concatenate([np.zeros(0), *(np.asarray(t) - e for e, t in zip(engine, trainer, strict=True))])
    exact = np.abs(np.nan_to_num(delta, nan=20.0, posinf=20.0, neginf=20.0))
    size = exact.clip(_FLOOR, 20.0)  # clipped for the bins only; the mean uses the exact values
    with open_image("Tokens by |Δ log p| between engine and trainer", _WIDTH) as (axes, png):
        add_grid(axes)
        edges = np.logspace(np.log10(_FLOOR), np.log10(20.0), 42)
        axes.hist(size, bins=list(edges), color=PALETTE[0])
        axes.set_xscale("log")
        axes.set_xlabel("|Δ log p|, nats", fontsize=9, color=INK)
        axes.set_ylabel("tokens", fontsize=9, color=INK)
        if len(size):
            mean = float(exact.mean())
            axes.axvline(max(mean, _FLOOR), color=PALETTE[1], linewidth=1.6, label=f"mean {mean:.2g}")
        axes.axvline(tolerance, color=INK, linewidth=1.2, linestyle="--", label=f"tolerance of the mean {tolerance:g}")
        axes.legend(fontsize=8.5, frameon=False, labelcolor=INK)
    return png.getvalue()


def draw_budget(budget: Mapping[str, Any]) -> bytes:
    """Draw each cause's share of the gap, as PNG. ``budget``: ``Budget.to_dict()``."""
    rows = sorted((c for c in budget["causes"] if not c["why"]), key=lambda c: abs(c["share"]))
    names = [fill(c["name"], _CAUSE) for c in rows]
    shares = [c["share"] for c in rows]
    right = max([*shares, 0.01])
    lines = sum(name.count("\n") + 1 for name in names)
    with open_image("What the mismatch consists of", _WIDTH, 1.5 + 0.36 * lines) as (axes, png):
        add_grid(axes)
        axes.barh(
            names,
            shares,
            color=[PALETTE[2] if c["corrected"] else PALETTE[0] for c in rows],
            height=0.62,
        )
        for i, c in enumerate(rows):
            axes.text(
                max(c["share"], 0) + 0.015 * right,
                i,
                f"{c['share']:z.1%}, |Δ| {c['abs_delta']:.2g}" + (", replayed" if c["corrected"] else ""),
                va="center",
                fontsize=8.5,
                color=INK,
            )
        axes.set_xlim(min([*shares, 0.0]) * 1.1, right * 1.45)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel("share of the gap (of its squares)", fontsize=9, color=INK)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=FAINT, linewidth=0.8)
    return png.getvalue()
