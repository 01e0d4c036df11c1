"""Writes ``exact.md`` from the newest results of ``benchmarks/true_on_policy.py``: the gap by model family and by number format.

Run ``python docs/draw_gaps.py``; a test fails while the page is older than the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
PAGE = DOCS / "exact.md"
INTRODUCTION = """\
# Exact log-probabilities, by family and format

The largest difference of a token's log-probability between the embedded engine and trainer, in nats, without and with
[`true_on_policy`](../plugins/true_on_policy/README.md). Engine and trainer have the same weights; the engine samples seven requests at
different batch sizes, and the trainer scores them in micro-batches of 1, 3 and all samples, with and without shared prompts
(`benchmarks/true_on_policy.py`). The models are tiny and random. "0" is exactly 0: every token, bit for bit.
"""


def read(part: str) -> dict[str, Any]:
    """Return the newest result file of a part, such as ``families-gpu``."""
    found = sorted(RESULTS.glob(f"true_on_policy-????-??-??-{part}.json"))[-1]
    return {"file": found.name, **json.loads(found.read_text(encoding="utf-8"))}


def row(name: str, sides: list[Any]) -> str:
    """Return a line of a table: without and with the plugin for each side and dtype, or the reason of a refusal."""
    refused = next((side for side in sides if isinstance(side, str)), None)
    if refused is not None:
        return f"| {name} | refused: {refused} | | | | |"
    cells = [f"{plain:.1g}" for side in sides for plain, _ in side.values()]
    exact = [f"{with_plugin:.2g}" for side in sides for _, with_plugin in side.values()]
    return f"| {name} | {' | '.join(cells)} | {', '.join(sorted(set(exact)))} |"


def table(first: str, part: str, pick: Any) -> list[str]:
    """Return a table of one part on both devices, and its sources. ``pick`` flattens a result to name -> dtype -> gaps."""
    cpu, gpu = read(part), read(f"{part}-gpu")
    sides = [pick(cpu[part]), pick(gpu[part])]
    lines = [f"| {first} | CPU, FP32 | CPU, BF16 | H100, FP32 | H100, BF16 | all four with the plugin |"]
    lines += ["|---|--:|--:|--:|--:|--:|"]
    lines += [row(name, [side[name] for side in sides]) for name in sides[0] if name in sides[1]]
    sources = " and ".join(f"`{each['file']}` (commit {each['commit']})" for each in (cpu, gpu))
    return [*lines, "", f"Results: {sources}."]


def by_format(found: dict[str, Any]) -> dict[str, Any]:
    """Return "family, format" -> dtype -> gaps."""
    return {f"{family}, `{name}`": gaps for family, formats in found.items() for name, gaps in formats.items()}


def render() -> str:
    """Return the page."""
    families = table("family", "families", dict)
    formats = table("family and format", "formats", by_format)
    heading = "## Number formats\n\nEngine and trainer compute in the format, emulated; the mean of |Δ log p| over the tokens of a step."
    return "\n".join([INTRODUCTION, "## Model families", "", *families, "", heading, "", *formats, ""])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
