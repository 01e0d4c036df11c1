"""The page of runs: its data, and its files. ``miles watch`` serves both; a report is the same page with the data inside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from miles_core.errors import MilesError
from miles_core.plugin.discovery import discover
from miles_core.redact import redact_values, show_controls
from miles_core.version import __version__
from miles_tools.report.reading import RunReader
from miles_tools.report.series import group_runs, list_differences, make_sections
from miles_tools.report.summary import describe_run

#: The page's files and their MIME types; "" is the page itself. uPlot (MIT) draws the lines.
FILES = {
    "": "text/html; charset=utf-8",
    **dict.fromkeys(("uPlot.css", "style.css"), "text/css; charset=utf-8"),
    **dict.fromkeys(
        ("uPlot.js", "base.js", "plots.js", "thread.js", "samples.js", "views.js", "app.js"),
        "text/javascript; charset=utf-8",
    ),
}


def read_page_file(name: str) -> str:
    """Return the text of one of ``FILES``."""
    return files("miles_tools.report").joinpath("page", name or "page.html").read_text(encoding="utf-8")


def gather(runs: Sequence[RunReader], problems: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return what the page shows of runs that were refreshed, without samples, as JSON types; credentials are removed.

    Args:
        runs: the runs.
        problems: number of a run -> why its newest data could not be read.

    Raises:
        MilesError: a file that a plugin wrote for a plot is damaged.
    """
    problems = problems or {}
    data = {
        "title": ", ".join(run.label for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        "core": __version__,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [{**describe_run(run), "problem": problems.get(number, "")} for number, run in enumerate(runs)],
        "differences": list_differences(runs) if len(runs) > 1 else [],
        "groups": [{"label": group.label, "runs": [run.label for run in group.runs]} for group in group_runs(runs)],
        "sections": make_sections(runs, [panel for plugin in discover().values() for panel in plugin.panels]),
    }
    return dict(clean(data))


def clean(value: Any) -> Any:
    """Return data for the page without credentials and with visible control characters, which the page would decode from JSON."""
    return _show(redact_values(value))


def _show(value: Any) -> Any:
    if isinstance(value, str):
        return show_controls(value)
    if isinstance(value, dict):
        return {show_controls(str(key)): _show(item) for key, item in value.items()}
    return [_show(item) for item in value] if isinstance(value, list | tuple) else value


def to_json(value: Any) -> str:
    """Encode data of the page; numbers that are not finite are an error, as JSON has none."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def put_inside(overview: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the page as one file with its data inside. Its policy allows only the scripts and styles in it, and no connections.

    Args:
        overview: the result of ``gather``.
        samples: whole samples, each with ``run``, ``kind`` and ``step``.
    """
    styles = [read_page_file(name) for name in re.findall(r'stylesheet" href="([\w.]+)"', read_page_file(""))]
    scripts = [read_page_file(name) for name in re.findall(r'script src="([\w.]+)"', read_page_file(""))]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = read_page_file("").replace(
        "<meta charset=", f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<meta charset='
    )
    page = re.sub(r'<link rel="stylesheet"[^>]*>\n', "", page)
    page = re.sub(r"<script src=[^>]*></script>\n", "", page)
    data = to_json({"overview": overview, "samples": samples}).replace("<", "\\u003c")
    head, rest = page.split("</head>")
    body, tail = rest.split('id="data">')
    parts = [head, *(f"<style>{text}</style>\n" for text in styles), "</head>", body, 'id="data">', data]
    script, end = tail.split("</script>\n", 1)
    parts += [script, "</script>\n", *(f"<script>{text}</script>\n" for text in scripts), end]
    return "".join(parts).encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def refresh(runs: Sequence[RunReader], problems: dict[int, str]) -> bool:
    """Refresh all runs and return whether anything changed; ``problems`` receives why the newest data of a run could not be read."""
    changed = False
    for number, run in enumerate(runs):
        try:
            if run.refresh():
                changed = True
                problems.pop(number, None)
        except MilesError as error:
            changed = True
            problems[number] = str(error)
    return changed
