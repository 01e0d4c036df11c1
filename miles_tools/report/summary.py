"""Describes one run for the page: its progress, the numbers at the top, the table of metrics, workers, options and machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from miles_core.observe import environment as env
from miles_core.observe.metrics import names, series
from miles_core.observe.terminal import is_graded
from miles_tools.report.budget_table import BUDGET_COLUMNS, budget_rows
from miles_tools.report.reading import RunReader, options_of

Records = Sequence[Mapping[str, Any]]

#: Metrics with a preferred direction; for others the table shows the range only.
UPWARD = ("reward/mean", "eval/accuracy", "eval/reward", "rollout/tokens_per_second")
DOWNWARD = ("mismatch/abs_log_prob", "mismatch/kl_k3", "sft/loss")
#: Groups of metrics at the top and at the end of the table; other groups are between them.
FIRST, LAST = ("eval", "reward", "rollout", "train", "mismatch", "verify"), ("time", "busy", "idle")
#: Entries of a plan's fact that the page shows.
_FACT = ("name", "value", "origin", "flag")


def describe_run(run: RunReader) -> dict[str, Any]:
    """Return what the page shows of a run besides its plots and samples, as JSON types."""
    total = options_of(run.config).get("rollout.num_rollout")
    total = total if isinstance(total, int) else None
    return {
        "label": run.label,
        "path": str(run.directory),
        "status": describe_status(run, total),
        "cards": _cards(run.records, total),
        "hints": run.hints,
        "plan": _describe_plan(run.plan),
        "environment": describe_environment(run.environment),
        "changed": list_changed(run.config),
        "rows": [describe_metric(name, run.records) for name in sorted(names(run.records), key=_rank)],
        "workers": list_workers(run.records),
        "budgets": _describe_budgets(run.budgets),
        "steps": run.steps,
    }


def describe_status(run: RunReader, total: int | None) -> dict[str, Any]:
    """Return ``state`` (waiting, running, stopped or finished), ``text`` with the progress in one sentence, and ``age``, the
    seconds since the last step, or None; the page continues to count them."""
    records = run.records
    if not records:
        ended = _describe_end(run.ending, 0.0)
        text = "This run has not completed a step yet, so there is nothing to plot."
        return {"state": "stopped" if ended else "waiting", "text": text + ended, "age": None}
    last, at = records[-1]["step"], _time(records[-1])
    ended = _describe_end(run.ending, at)
    if ended and run.ending["why"] != "finished" and isinstance(run.ending.get("of"), int):
        total = run.ending["of"]  # a continuation that failed at its start left the saved options as they were
    if total is not None and last >= total:
        return {"state": "finished", "text": f"Finished: {total} of {total} steps are complete.", "age": None}
    age = time.time() - at
    gaps = [_time(b) - _time(a) for a, b in pairwise(records[-200:])]
    running = age < max(60.0, 5 * statistics.median(gaps or [0.0])) and not ended
    of = f"{last} of {total} steps are complete" if total is not None else f"{last} steps are complete"
    state = "Still running" if running else "Not running"
    text = f"{state}: {of}, the last one {format_duration(age)} ago.{ended}"
    return {"state": "running" if running else "stopped", "text": text, "age": round(age, 1)}


def _time(record: Mapping[str, Any]) -> float:
    """Return the record's time in seconds since the epoch; 0 if it has none."""
    try:
        return float(record.get("time") or 0)
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _describe_end(ending: Mapping[str, Any], since: float) -> str:
    """Describe how the run ended, if it ended after ``since`` (a resumed run ends again)."""
    return f" It {ending['why']}." if ending.get("why") and _time(ending) >= since else ""


def _finite(records: Records, metric: str) -> list[float]:
    return [value for value in series(records, metric)[1] if not math.isnan(value)]


def _cards(records: Records, total: int | None) -> list[dict[str, str]]:
    """Return the numbers at the top of the page."""
    if not records:
        return []
    done = records[-1]["step"]
    cards = [{"label": "steps", "value": str(done), "note": f"of {total}" if total is not None else ""}]
    held_out = ("eval/accuracy", "held-out accuracy", "{:.1%}")
    if any(is_graded(record) for record in records):
        held_out = ("eval/reward", "held-out reward", "{:.3f}")
    for metric, label, form in (held_out, ("reward/mean", "reward", "{:.3f}")):
        if values := _finite(records, metric):
            start = f"from {form.format(values[0])}" if len(values) > 1 else ""
            cards.append({"label": label, "value": form.format(values[-1]), "note": start})
    if seconds := _finite(records, "time/step"):
        pace = f"{statistics.median(seconds):.2f} s a step"
        cards.append({"label": "time", "value": format_duration(sum(seconds)), "note": pace})
    if speed := _finite(records, "rollout/tokens_per_second"):
        cards.append({"label": "tokens/s in rollout", "value": f"{statistics.median(speed):,.0f}", "note": "median"})
    if gap := _finite(records, "mismatch/kl_k3"):
        cards.append({"label": "mismatch KL", "value": f"{statistics.median(gap):.2g}", "note": "median, nats a token"})
    return cards


def _rank(name: str) -> int:
    """Return the position of a metric's group in the table; names may begin with a policy's name."""
    groups = name.split("/")[:2]
    first = next((FIRST.index(group) for group in groups if group in FIRST), len(FIRST))
    return len(FIRST) + 1 if groups[0] in LAST else first


def describe_metric(name: str, records: Records) -> list[str]:
    """Return a row of the table: name, first and last value, best, lowest and highest one, and a note; "" if not applicable."""
    steps, values = series(records, name)
    finite = [(v, s) for s, v in zip(steps, values, strict=True) if not math.isnan(v)]
    bad = len(values) - len(finite)
    note = f"{bad} of {len(values)} values not finite" if bad else ""
    if not finite:
        return [name, "", "", "", "", "", note]
    low, high = min(finite), max(finite, key=lambda pair: (pair[0], -pair[1]))
    best = high if name in UPWARD else low if name in DOWNWARD else None
    best_text = f"{format_number(best[0])} (step {best[1]})" if best else ""
    numbers = [format_number(value) for value in (low[0], high[0])]
    return [name, format_number(values[0]), format_number(values[-1]), best_text, *numbers, note]


def list_workers(records: Records) -> list[dict[str, Any]]:
    """Return each worker process with its time with work and its share without, of the last step and over the run (a median)."""
    present = names(records)
    found: dict[str, dict[str, Any]] = {}
    for kind in ("busy", "idle"):
        for metric in (name for name in present if name.startswith(f"{kind}/")):
            if values := _finite(records, metric):
                worker = found.setdefault(metric.partition("/")[2], {})
                worker[kind] = {"last": values[-1], "median": statistics.median(values)}
    return [{"name": name, **values} for name, values in sorted(found.items())]


def list_changed(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the options that the user set (the effective configuration lists others under ``defaults``)."""
    return [(name, _as_text(value)) for name, value in options_of(config, defaults=False).items()]


def _as_text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def describe_environment(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the machine of a run as rows of a table."""
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


def _describe_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``plan.json`` that the page shows; facts as rows."""
    if not plan:
        return {}
    facts = [fact for fact in plan.get("facts") or () if isinstance(fact, Mapping) and fact.get("state") == "KNOWN"]
    return {
        **{name: plan.get(name) for name in ("digest", "core")},
        "plugins": [dict(plugin) for plugin in plan.get("plugins") or ()],
        "sets": [dict(setting) for setting in plan.get("sets") or ()],
        "advice": list(plan.get("advice") or ()),
        "facts": [["" if fact.get(name) is None else _as_text(fact[name]) for name in _FACT] for fact in facts],
    }


def _describe_budgets(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each policy, the causes of the mismatch between engine and trainer at its first sync, measured with
    ``--verify-logprobs``."""
    return [
        {
            "title": f"Mismatch budget at weight version {budget['version']}{f' of {policy}' if len(found) > 1 else ''}",
            "columns": BUDGET_COLUMNS,
            "rows": budget_rows(budget),
        }
        for policy, budget in found.items()
    ]


def format_number(value: float) -> str:
    """Format a metric for a table."""
    if isinstance(value, float) and math.isnan(value):
        return "not finite"
    if value == 0 or (float(value).is_integer() and abs(value) < 1e7):
        return f"{value:.0f}"
    return f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Format a time in seconds as text."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
