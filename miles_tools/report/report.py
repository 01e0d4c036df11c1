"""Writes the report of a run: one self-contained HTML file, and its plots as PNG files.

It reads the files of a run directory (``metrics.jsonl``, ``plan.json``, ``config.yaml``, ``environment.json``, ``rollouts/``). Any of them may
be missing, and the run may have no or few steps, or still be running.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from miles_core.errors import CheckpointError, MilesError
from miles_core.mismatch.budget import BUDGET_FILE
from miles_core.observe import environment as env
from miles_core.observe.hints import hints_of, review
from miles_core.observe.metrics import names, read, series
from miles_core.observe.terminal import is_graded
from miles_core.plugin.discovery import discover
from miles_core.plugin.panel import Panel
from miles_core.plugin.plan import Plan
from miles_core.redact import redact, show_controls
from miles_core.run.ending import ENDING
from miles_core.version import __version__
from miles_tools.output_file import make_folder, write_file
from miles_tools.report.budget_table import BUDGET_COLUMNS, budget_rows
from miles_tools.report.drawing import draw_all
from miles_tools.report.grids import find_grids
from miles_tools.report.mismatch_plots import draw_budget
from miles_tools.report.plots import moves, panels
from miles_tools.report.samples import browser

log = logging.getLogger(__name__)

HTML = "report.html"
IMAGES = "report"
#: Image of the mismatch budget.
BUDGET = "budget"
#: Metrics with a preferred direction; for others the table shows the range only.
UPWARD = ("reward/mean", "eval/accuracy", "eval/reward", "rollout/tokens_per_second")
#: Plots above the samples.
OVERVIEW = 3
DOWNWARD = ("mismatch/abs_log_prob", "mismatch/kl_k3", "sft/loss")
#: Groups of metrics at the top and at the end of the summary table; other groups are between them.
FIRST, LAST = ("eval", "reward", "rollout", "train", "mismatch", "verify"), ("time", "busy", "idle")


@dataclass(frozen=True)
class Row:
    """One metric of the summary table; texts are empty if not applicable."""

    name: str
    first: str
    last: str
    best: str
    lowest: str
    highest: str
    note: str


def report(run_dir: Path | str) -> Path:
    """Write ``report.html`` and ``report/*.png`` into ``run_dir`` and return the HTML file's path.

    Raises MilesError when the directory is no run directory, or a file in it is not what a run wrote.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise MilesError(f"{run_dir}: no such directory; give a run directory, the one --save named")
    found = [f for f in ("metrics.jsonl", "plan.json", "config.yaml") if (run_dir / f).is_file()]
    if not found:
        raise MilesError(f"{run_dir} is not a run directory: it has neither metrics.jsonl, plan.json nor config.yaml")
    records = read(run_dir / "metrics.jsonl")
    declared = [panel for plugin in discover().values() for panel in plugin.panels]
    chosen = panels(records, [panel for panel in declared if panel.kind != "grid"])
    grids = list(find_grids(run_dir, declared))
    budget = read_json(run_dir / BUDGET_FILE)
    with ThreadPoolExecutor(1) as beside:  # other processes draw while this one writes the page
        drawing = beside.submit(draw_all, chosen, records)
        page = _page(run_dir, records, budget, [*chosen, *(panel for panel, _ in grids)])
        images = drawing.result() | {panel.name: png for panel, png in grids}
    images |= {BUDGET: draw_budget(budget)} if budget else {}
    _write_images(run_dir / IMAGES, images)
    target = run_dir / HTML
    write_file(target, _insert_images(page, images))
    return target


def _page(
    run_dir: Path, records: Sequence[Mapping[str, Any]], budget: Mapping[str, Any], shown: Sequence[Panel]
) -> str:
    """Render the page with the names of the images in place of the images, and remove credentials. Images contain none, and searching
    them takes longer than drawing them."""
    config = read_yaml(run_dir / "config.yaml")
    total = _lookup(config, "rollout", "num_rollout")
    total = total if isinstance(total, int) else None
    page = render(
        HTML,
        title=run_dir.resolve().name,
        status=_status(run_dir, records, total),
        cards=_cards(records, total),
        plan=read_json(run_dir / "plan.json"),
        environment=_environment(run_dir),
        hints=review(records, hints_of(discover().values(), _holds(run_dir / "plan.json"))),
        sections=_sections(shown, records),
        budget=_budget(budget),
        rows=[_row(name, records) for name in sorted(names(records), key=_rank)],
        samples=browser(run_dir, _lookup(config, "reward", "reward_key")),
        changed=_list_changed(config),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )
    return show_controls(redact(page))


def _insert_images(page: str, images: Mapping[str, bytes]) -> bytes:
    """Replace the names of images in a page by the images, in one pass: the page has megabytes."""

    def image(found: re.Match[str]) -> str:
        png = images.get(found[1])
        return found[0] if png is None else f'src="data:image/png;base64,{base64.b64encode(png).decode()}"'

    return re.sub(r'src="([^"<>]+)\.png"', image, page).encode()


def render(template: str, **values: Any) -> str:
    """Render a template of this package to an HTML page."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("miles_tools.report", ""), autoescape=True)
    return environment.get_template(template).render(**values)


def _write_images(directory: Path, images: Mapping[str, bytes]) -> None:
    """Write every image into ``directory``, and remove earlier ones."""
    make_folder(directory)
    for name, png in images.items():
        write_file(directory / f"{name}.png", png)
    for old in directory.glob("*.png"):
        if old.stem not in images:
            old.unlink()


@dataclass(frozen=True)
class Section:
    """Some plots under a heading; ``folded``: closed until the reader opens it."""

    anchor: str
    title: str
    plots: list[dict[str, str]]
    folded: bool = False


def _sections(chosen: Sequence[Panel], records: Sequence[Mapping[str, Any]]) -> list[Section]:
    """The plots in the order of the page: the first few, the rest of training, each plugin's, and folded ones at the end."""
    sections: dict[str, list[dict[str, str]]] = {}
    still = []
    for panel in chosen:
        plot = {"title": panel.title, "image": f"{panel.name}.png"}
        if panel.kind == "grid" or moves(panel, records):
            sections.setdefault(panel.section, []).append(plot)
        else:
            still.append(plot)
    own, more = sections.pop("", []), sections.pop("More metrics", [])
    found = [Section("overview", "Overview", own[:OVERVIEW]), Section("training", "Training", own[OVERVIEW:])]
    for number, (name, plots) in enumerate(sections.items()):
        found.append(Section(f"plugin-{number}", f"Plugin {name}", plots))
    found.append(Section("more", "More metrics", more, folded=True))
    found.append(Section("constant", "Metrics that did not change", still, folded=True))
    return [section for section in found if section.plots]


def _budget(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the causes of the mismatch between engine and trainer at the first sync, measured with ``--verify-logprobs``."""
    if not found:
        return {}
    return {
        "image": f"{BUDGET}.png",
        "columns": BUDGET_COLUMNS,
        "rows": budget_rows(found),
        "version": found.get("version"),
    }


def _status(run_dir: Path, records: Sequence[Mapping[str, Any]], total: int | None) -> str:
    """Describe the progress of the run in one sentence."""
    if not records:
        return "This run has not completed a step yet, so there is nothing to plot." + _describe_end(run_dir, 0.0)
    last = records[-1]["step"]
    if total is not None and last >= total:
        return f"Finished: {total} of {total} steps are complete."
    age = time.time() - _time(records[-1])
    gaps = [_time(b) - _time(a) for a, b in pairwise(records)]
    running = age < max(60.0, 5 * statistics.median(gaps or [0.0]))
    of = f"{last} of {total} steps are complete" if total is not None else f"{last} steps are complete"
    ended = _describe_end(run_dir, _time(records[-1]))
    state = "Still running" if running and not ended else "Not running"
    return f"{state}: {of}, the last one {_duration(age)} ago.{ended}"


def _time(record: Mapping[str, Any]) -> float:
    """Return the record's time in seconds since the epoch; 0 if it has none."""
    try:
        return float(record.get("time") or 0)
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _describe_end(run_dir: Path, since: float) -> str:
    """Describe how the run ended, if it ended after ``since`` (a resumed run ends again)."""
    found = read_json(run_dir / ENDING)
    return f" It {found['why']}." if found.get("why") and _time(found) >= since else ""


def _cards(records: Sequence[Mapping[str, Any]], total: int | None) -> list[dict[str, str]]:
    """Return the numbers at the top of the report."""
    if not records:
        return []
    done = records[-1]["step"]
    cards = [{"label": "steps", "value": str(done), "note": f"of {total}" if total is not None else ""}]
    held_out = ("eval/accuracy", "held-out accuracy", "{:.1%}")
    if any(is_graded(record) for record in records):
        held_out = ("eval/reward", "held-out reward", "{:.3f}")
    for metric, label, form in (held_out, ("reward/mean", "reward", "{:.3f}")):
        values = [v for v in series(records, metric)[1] if not math.isnan(v)]
        if values:
            start = f"from {form.format(values[0])}" if len(values) > 1 else ""
            cards.append({"label": label, "value": form.format(values[-1]), "note": start})
    seconds = [v for v in series(records, "time/step")[1] if not math.isnan(v)]
    if seconds:
        pace = f"{statistics.median(seconds):.2f} s a step"
        cards.append({"label": "time", "value": _duration(sum(seconds)), "note": pace})
    speed = [v for v in series(records, "rollout/tokens_per_second")[1] if not math.isnan(v)]
    if speed:
        cards.append({"label": "tokens/s in rollout", "value": f"{statistics.median(speed):,.0f}", "note": "median"})
    gap = [v for v in series(records, "mismatch/kl_k3")[1] if not math.isnan(v)]
    if gap:
        cards.append({"label": "mismatch KL", "value": f"{statistics.median(gap):.2g}", "note": "median, nats a token"})
    return cards


def _rank(name: str) -> int:
    """Return the position of a metric's group in the summary table; names may begin with a policy's name."""
    groups = name.split("/")[:2]
    first = next((FIRST.index(group) for group in groups if group in FIRST), len(FIRST))
    return len(FIRST) + 1 if groups[0] in LAST else first


def _row(name: str, records: Sequence[Mapping[str, Any]]) -> Row:
    steps, values = series(records, name)
    finite = [(v, s) for s, v in zip(steps, values, strict=True) if not math.isnan(v)]
    bad = len(values) - len(finite)
    note = f"{bad} of {len(values)} values not finite" if bad else ""
    if not finite:
        return Row(name, "", "", "", "", "", note)
    low, high = min(finite), max(finite, key=lambda pair: (pair[0], -pair[1]))
    best = high if name in UPWARD else low if name in DOWNWARD else None
    best_text = f"{format_number(best[0])} (step {best[1]})" if best else ""
    return Row(
        name,
        format_number(values[0]),
        format_number(values[-1]),
        best_text,
        format_number(low[0]),
        format_number(high[0]),
        note,
    )


def _list_changed(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the options that the user set (the effective configuration lists others under ``defaults``)."""
    rows = []
    for table, values in config.items():
        if table != "defaults" and isinstance(values, Mapping):
            rows += [(f"{table}.{key}", _option(value)) for key, value in values.items()]
    return rows


def _option(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _holds(file: Path) -> Callable[[str], bool]:
    """Return a function that evaluates a condition for the run of this plan; without a readable plan, only the empty condition holds."""
    try:
        return Plan.from_json(file.read_text(encoding="utf-8")).holds
    except (OSError, CheckpointError):  # of a run by another version, or none
        return lambda condition: not condition


def _environment(run_dir: Path) -> list[tuple[str, str]]:
    found = read_json(run_dir / env.FILE)
    if not found:
        return []
    gpus = [f"{g['name']} ({env.bytes_text(g['memory'])}, sm_{g['sm']})" for g in found.get("gpus", ())]
    memory = env.bytes_text(found["memory"]) if found.get("memory") else "unknown"
    return [
        ("hardware", f"{found.get('processor')}, {found.get('cpus')} threads, {memory} memory"),
        ("GPUs", "; ".join(gpus) or f"none ({found.get('no_gpu')})"),
        ("system", f"{found.get('platform')}, Python {found.get('python')}"),
        ("packages", ", ".join(f"{name} {number}" for name, number in found.get("packages", {}).items())),
        ("command", " ".join(found.get("command", ()))),
    ]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a run; {} if there is no such file. MilesError if it is damaged."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise MilesError(f"{path} is not what a run wrote ({error}); restore or remove it") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping of a run; {} if there is no such file. MilesError if it is damaged."""
    if not path.is_file():
        return {}
    import yaml

    try:
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise MilesError(f"{path} is not what a run wrote ({error}); restore or remove it") from error


def _lookup(config: Mapping[str, Any], table: str, key: str) -> Any:
    """Return an option's value, set or default."""
    for part in (config, config.get("defaults") or {}):
        values = part.get(table) if isinstance(part, Mapping) else None
        if isinstance(values, Mapping) and key in values:
            return values[key]
    return None


def format_number(value: float) -> str:
    """Format a metric for a table."""
    if isinstance(value, float) and math.isnan(value):
        return "not finite"
    if value == 0 or (float(value).is_integer() and abs(value) < 1e7):
        return f"{value:.0f}"
    return f"{value:.4g}"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
