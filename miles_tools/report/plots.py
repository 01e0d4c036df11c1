"""The report's plots: selects panels for a set of metrics, and draws them.

``panels`` decides what to show, ``draw`` how it looks. matplotlib is imported only for drawing, with the Agg backend and without pyplot, so
that it needs no display and no global state.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise
from statistics import fmean
from textwrap import shorten
from typing import TYPE_CHECKING, Any, cast

from miles_core.observe.metrics import names, series
from miles_core.observe.terminal import is_graded
from miles_core.plugin.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[Mapping[str, Any]]

#: Okabe and Ito's colours, distinguishable with any colour vision; the first is for the most important line of a panel.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#6A51A3")
INK = "#1f2933"
FAINT = "#d9dee4"
TITLE: dict[str, Any] = {"fontsize": 11.5, "color": INK, "fontweight": "bold"}
#: Lines with at least this many points are drawn faintly, with their moving average on top.
SMOOTH_FROM = 60
#: Values whose relative spread is below this differ only by rounding, and are drawn as a flat line.
ROUNDING = 1e-6
#: A line is constant if its values differ by less than STILL relative to the largest, or stay below FLOOR (FP32 rounding near 1).
STILL, FLOOR = 1e-3, 1e-7
#: Panels that are always shown.
ALWAYS = ("reward", "time")
#: Prefixes of core's metrics; all other prefixes belong to plugins.
CORE = ("reward", "eval", "rollout", "train", "mismatch", "sync", "time", "sft")
PHASES = ("rollout", "prepare", "train", "sync", "evaluation", "save")


MAIN = (
    Panel(
        "reward",
        "Reward and held-out accuracy",
        {"reward/mean": "mean reward", "eval/accuracy": "held-out accuracy"},
        band="reward/std",
        marked=frozenset({"eval/accuracy"}),
    ),
    Panel("length", "Response length", {"rollout/length_mean": "mean length"}, "tokens"),
    Panel("truncated", "Responses cut at the length limit", {"rollout/truncated": "truncated"}, percent=True),
    Panel(
        "mismatch",
        "Mismatch between engine and trainer",
        {"mismatch/kl_k3": "KL (k3)", "mismatch/abs_log_prob": "mean |Δ log p|"},
        "nats per token",
        log=True,
    ),
    Panel(
        "kl",
        "KL divergence",
        {"train/approx_kl_k3": "from the rollout's policy", "train/ref_kl": "from the reference model"},
        "nats per token",
    ),
    Panel("loss", "Policy loss", {"train/loss": "loss"}),
    Panel("grad_norm", "Gradient norm", {"train/grad_norm": "norm before clipping"}, log=True),
    Panel(
        "entropy", "Entropy of the policy", {"rollout/entropy": "sampled", "train/entropy": "exact"}, "nats per token"
    ),
    Panel(
        "clip",
        "Tokens clipped by the policy loss",
        {"train/clip_fraction_high": "above", "train/clip_fraction_low": "below"},
        percent=True,
    ),
    Panel("lr", "Learning rate", {"train/lr": "learning rate"}),
    Panel("throughput", "Rollout speed", {"rollout/tokens_per_second": "generated"}, "tokens per second"),
    Panel("warm_start", "Supervised warm start", {"sft/loss": "negative log-likelihood"}, "nats per token"),
)

#: Panels with one line per worker process, from metrics NAME/WORKER.
WORKERS = (
    Panel("busy", "Time with work, by worker", {}, "seconds a step"),
    Panel("idle", "Time without work, by worker", {}, percent=True),
)


def panels(records: Records, declared: Iterable[Panel] = ()) -> list[Panel]:
    """Return the panels for these records: the main panels with existing metrics, time by phase, panels ``declared`` by plugins, then the
    remaining metrics of core and of each plugin, with one panel per metric under a separate heading."""
    present = names(records)
    flat = _flat(records, present)
    chosen = []
    mean = any(is_graded(record) for record in records)
    for panel in MAIN:
        if panel.name == "reward" and mean:
            lines = {"reward/mean": "mean reward", "eval/reward": "mean held-out reward"}
            panel = replace(panel, title="Reward", lines=lines, marked=frozenset({"eval/reward"}))
        lines = {metric: label for metric, label in panel.lines.items() if metric in present}
        if any(metric not in flat for metric in lines):
            band = panel.band if panel.band in present and next(iter(lines)) == "reward/mean" else ""
            title = panel.title if "eval/accuracy" in lines or panel.name != "reward" else "Reward"
            chosen.append(replace(panel, lines=lines, band=band, title=title))
    phases = [m for m in present if m.startswith("time/") and m != "time/step" and m not in flat]
    phases.sort(key=lambda m: (m == "time/other", (*PHASES, m[5:]).index(m[5:])))
    if phases:
        lines = {metric: metric.removeprefix("time/") for metric in phases}
        chosen.append(Panel("time", "Time by phase", lines, "seconds a step", kind="stack"))
    for panel in WORKERS:
        if lines := {m: m.partition("/")[2] for m in present if m.startswith(f"{panel.name}/")}:
            chosen.append(replace(panel, lines=lines))
    chosen += [replace(panel, lines=lines) for panel in declared if (lines := _matching(panel.lines, present))]
    shown = {m for panel in chosen for m in panel.lines} | {"time/step", "reward/std"} | flat
    rest = [m for m in present if m not in shown]
    chosen += [_single(m, "More metrics") for m in rest if _prefix(m) in CORE]
    return _make_distinct(
        chosen + [_single(m, _prefix(m)) for m in sorted(rest, key=_prefix) if _prefix(m) not in CORE]
    )


def moves(panel: Panel, records: Records) -> bool:
    """Whether the plot shows more than the summary table: some line of it changes by more than rounding. Short runs count as moving."""
    if panel.name in ALWAYS:
        return True
    for metric in panel.lines:
        values = series(records, metric)[1]
        finite = [v for v in values if math.isfinite(v)]
        largest = max(map(abs, finite), default=0.0)
        if len(values) < 3 or len(finite) < len(values):
            return True
        if largest > FLOOR and max(finite) - min(finite) > STILL * largest:
            return True
    return False


def _make_distinct(chosen: list[Panel]) -> list[Panel]:
    """Return the panels with unique names that are valid file names."""
    used: set[str] = set()
    found = []
    for panel in chosen:
        stem = re.sub(r"[^\w.+-]", "_", panel.name)[:100]
        name = next(n for n in (stem, *(f"{stem}_{i}" for i in range(2, len(chosen) + 2))) if n not in used)
        used.add(name)
        found.append(replace(panel, name=name, title=shorten(panel.title, 80, placeholder=" ...")))
    return found


def draw(panel: Panel, records: Records) -> bytes:
    """Draw a panel as a PNG image."""
    from matplotlib import rc_context

    # names may contain dollar signs
    with rc_context({"text.parse_math": False}), open_image(panel.title) as (axes, png):
        plot(axes, panel, records)
    return png.getvalue()


def plot(axes: Axes, panel: Panel, records: Records) -> None:
    """Draw a panel into axes."""
    _style(axes, panel)
    if panel.kind == "stack":
        _stack(axes, panel, records)
    else:
        _lines(axes, panel, records)
    _finish(axes, panel)


@contextmanager
def open_image(title: str, width: float = 5.4, height: float = 3.0) -> Iterator[tuple[Axes, io.BytesIO]]:
    """Context that yields the axes of an image with a title, and the buffer that has it as PNG afterwards. width, height: inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=170, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes, buffer = figure.add_subplot(), io.BytesIO()
    axes.set_title(title, loc="left", pad=10, **TITLE)
    axes.tick_params(labelsize=9, colors=INK, length=3)
    yield axes, buffer
    figure.savefig(buffer, format="png", metadata={"Software": None})


def add_grid(axes: Axes) -> None:
    """Draw horizontal lines behind the data, and no frame at the top and at the right."""
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _lines(axes: Axes, panel: Panel, records: Records) -> None:
    for color, (metric, label) in zip(_colors(len(panel.lines)), panel.lines.items(), strict=True):
        steps, values = without_huge(*without_warm_start(metric, *series(records, metric)))
        few = len(steps) <= 30 or metric in panel.marked
        marker: dict[str, Any] = {"marker": "o", "markersize": 4.5 if len(steps) < 12 else 3} if few else {}
        if len(steps) >= SMOOTH_FROM and metric not in panel.marked and _noisy(values):
            axes.plot(steps, values, color=color, alpha=0.28, linewidth=1)
            axes.plot(steps, smooth(values), color=color, linewidth=2, label=label)
        else:
            axes.plot(steps, values, color=color, linewidth=1.8, label=label, **marker)
        for step, value in zip(steps, values, strict=True):
            if math.isnan(value):
                axes.axvline(step, color="#b00020", linewidth=1, linestyle=":")
        if panel.band and metric == next(iter(panel.lines)):
            _band(axes, records, metric, panel.band, color)


def without_warm_start(metric: str, steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Leave out step 0 of metrics of training: it belongs to the supervised warm start, with another loss and learning rate."""
    if "train/" not in metric or len(steps) < 2 or steps[0] != 0:
        return steps, values
    return steps[1:], values[1:]


def without_huge(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Treat values that are too large for matplotlib's axes as not finite."""
    return steps, [v if abs(v) < 1e100 else math.nan for v in values]


def _band(axes: Axes, records: Records, metric: str, spread: str, color: str) -> None:
    """Draw a band of ± one ``spread`` around ``metric``, limited to the observed range of rewards."""
    at = dict(zip(*series(records, spread), strict=True))
    rows = [(s, v, at[s]) for s, v in zip(*series(records, metric), strict=True) if s in at]
    if len(rows) < 2:
        return
    floor = min(series(records, "reward/min")[1], default=-math.inf)
    ceiling = max(series(records, "reward/max")[1], default=math.inf)
    steps = [s for s, _, _ in rows]
    middle, wide = smooth([v for _, v, _ in rows]), smooth([d for _, _, d in rows])
    low = [max(v - d, floor) for v, d in zip(middle, wide, strict=True)]
    high = [min(v + d, ceiling) for v, d in zip(middle, wide, strict=True)]
    axes.fill_between(steps, low, high, color=color, alpha=0.10, linewidth=0, label="± 1 standard deviation")


def _stack(axes: Axes, panel: Panel, records: Records) -> None:
    # omit what precedes step 1 (warm start, first evaluation), which would dwarf the steps
    steps = [r["step"] for r in records if any(m in r for m in panel.lines) and (r["step"] or len(records) == 1)]
    table = {label: dict(zip(*series(records, m), strict=True)) for m, label in panel.lines.items()}
    parts = {label: [_number(at.get(s)) for s in steps] for label, at in table.items() if at.keys() & set(steps)}
    colors = _colors(len(parts))
    if len(steps) <= 40:
        base = [0.0] * len(steps)
        for label, values, color in zip(parts, parts.values(), colors, strict=True):
            axes.bar(steps, values, 0.85, bottom=base, color=color, label=label)
            base = [b + v for b, v in zip(base, values, strict=True)]
    else:
        axes.stackplot(steps, list(parts.values()), colors=colors, labels=list(parts), linewidth=0)
        axes.margins(x=0)
    axes.set_ylim(bottom=0)


def _style(axes: Axes, panel: Panel) -> None:
    axes.set_xlabel("step", fontsize=9, color=INK)
    if panel.unit:
        axes.set_ylabel(panel.unit, fontsize=9, color=INK)
    add_grid(axes)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9aa5b1")


def _finish(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

    plotted = [
        v
        for line in axes.lines
        for v in cast("Iterable[Any]", line.get_ydata())
        if isinstance(v, float) and math.isfinite(v)
    ]
    logarithmic = panel.log and plotted and min(plotted) > 0 and max(plotted) / min(plotted) > 20
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(
            lambda value, _: f"{value:g}"
        )  # matplotlib's own is mathematics, which is off here
    elif panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes.set_ylim(bottom=0, top=max(1.1 * max(plotted, default=0), 0.02))
    elif plotted and max(map(abs, plotted)) >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif plotted and max(map(abs, plotted)) == 0:
        axes.set_ylim(-0.04, 1)
    elif plotted and max(map(abs, plotted)) < 1e-3:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axes.yaxis.get_offset_text().set_fontsize(9)
    elif plotted and max(plotted) - min(plotted) < ROUNDING * max(map(abs, plotted)):
        middle = (max(plotted) + min(plotted)) / 2
        axes.set_ylim(middle - abs(middle) / 20, middle + abs(middle) / 20)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    count = len(axes.get_legend_handles_labels()[1])
    if count > 1:
        rows = math.ceil(count / 6)
        legend = axes.legend(
            fontsize=8.5,
            frameon=False,
            ncols=math.ceil(count / rows),
            labelcolor=INK,
            handlelength=1.3,
            columnspacing=1.3,
        )
        # Above the axes and under the title, so that it covers neither.
        legend.set_bbox_to_anchor((1.0, 0.985), transform=axes.transAxes)
        legend.set_loc("lower right")
        axes.set_title(axes.get_title(loc="left"), loc="left", pad=12 + 16 * rows, **TITLE)


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a fifteenth of the points (at least 1, at most 25), ignoring NaN."""
    half = max(0, min(len(values) // 30, 12))
    result = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - half) : i + half + 1] if not math.isnan(v)]
        result.append(fmean(near) if near else math.nan)
    return result


def _noisy(values: Sequence[float]) -> bool:
    """Whether the line oscillates much more than it changes overall."""
    finite = [v for v in values if not math.isnan(v)]
    way = sum(abs(b - a) for a, b in pairwise(finite))
    return bool(finite) and way > 3 * (max(finite) - min(finite)) > 0


def _colors(count: int) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(count)]


def _number(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def _flat(records: Records, present: Sequence[str]) -> set[str]:
    """Return core's metrics for which a plot adds nothing to the summary table: always 0, or one value in a longer run."""
    found = set()
    for metric in present:
        steps, values = series(records, metric)
        if _prefix(metric) in CORE and (all(v == 0 for v in values) or (len(steps) == 1 and len(records) > 2)):
            found.add(metric)
    return found


def _prefix(metric: str) -> str:
    return metric.partition("/")[0] if "/" in metric else "other"


def _single(metric: str, section: str) -> Panel:
    label = metric.partition("/")[2] or metric
    title = metric if section == "More metrics" else label
    return Panel(metric.replace("/", "_"), title.replace("_", " "), {metric: label}, section=section)


def _matching(lines: Mapping[str, str], present: Sequence[str]) -> dict[str, str]:
    """Return metric -> label for the existing metrics that match these names and patterns; empty if the first line has no match.

    A ``*`` in a label is replaced by the text that the pattern's ``*`` matched."""
    found: dict[str, str] = {}
    for number, (pattern, label) in enumerate(lines.items()):
        front, _, back = pattern.partition("*")
        metrics = [m for m in present if fnmatchcase(m, pattern)]
        found |= {m: label.replace("*", m.removeprefix(front).removesuffix(back)) for m in metrics}
        if not number and not found:
            break
    return found
