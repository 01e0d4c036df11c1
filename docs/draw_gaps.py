"""Writes ``exact.md`` from the newest results of ``benchmarks/true_on_policy.py``, ``sglang_exact.py`` and ``collapse.py``.

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
SGLANG = """\
## SGLang

Means of |Δ log p| in nats per token between SGLang 0.5.17 and the embedded trainer, for a random BF16 model on an H100.
`benchmarks/sglang_exact.py` explains the variants and columns.
"""
COLLAPSE = """\
## Does the gap matter?

A small mixture of experts learns running sums, first from a careless teacher and then by GRPO without a KL term, with eight optimizer steps per
rollout (`benchmarks/collapse.py`). Arms differ in the number formats of engine and trainer, and in the correction; FP8 is emulated, and `bf16`
has no number format. Rewards are means of three seeds with 95 % t-intervals. A seed collapsed if its last tenth is below half of its best tenth.
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


def newest(pattern: str) -> dict[str, Any] | None:
    """Return the newest result file of a pattern; None if there is none."""
    found = sorted(RESULTS.glob(pattern))
    return {"file": found[-1].name, **json.loads(found[-1].read_text(encoding="utf-8"))} if found else None


def sglang(model: str) -> list[str]:
    """Return the section of SGLang's gap for a model of the benchmark; nothing if it was not measured."""
    found = newest(f"sglang_exact-????-??-??-{model}.json")
    if found is None:
        return []
    columns = {
        "alone and together": "batch",
        "sampled and scored": "phase",
        "SGLang and FP32": "engine_rounding",
        "trainer and FP32": "trainer_rounding",
        "SGLang and trainer": "engine_trainer",
        "SGLang and exact trainer": "engine_exact_trainer",
    }
    lines = [f"| {model} | {' | '.join(columns)} | tokens that differ from the exact trainer |", "|---|" + "--:|" * 7]
    for variant, row in found["gaps"].items():
        if "error" in row:
            lines.append(f"| `{variant}` | did not run | | | | | | |")
            continue
        cells = [f"{row[name]['mean']:.2g}" for name in columns.values()]
        lines.append(f"| `{variant}` | {' | '.join(cells)} | {row['engine_exact_trainer']['differing']:.1%} |")
    return [*lines, "", f"Results: `{found['file']}` (commit {found['commit']}).", ""]


def collapse() -> list[str]:
    """Return the section of the training curves; nothing if they were not measured."""
    found = newest("collapse-????-??-??*.json")
    if found is None:
        return []
    lines = [
        "| learning rate | arm | reward of the last tenth | best tenth | seeds that collapsed | median KL | largest gap |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for lr, table in found["learning_rates"].items():
        for arm, row in table.items():
            ends = [
                f"{mean:.3f}" + ("" if half is None else f" ± {half:.3f}")
                for mean, half in (row["reward_last"], row["reward_best"])
            ]
            cells = [*ends, str(row["collapsed"]), f"{row['kl_median']:.2g}", f"{row['gap_largest']:.2g}"]
            lines.append(f"| {lr} | `{arm}` | {' | '.join(cells)} |")
    return [*lines, "", f"Results: `{found['file']}` (commit {found['commit']}).", ""]


def render() -> str:
    """Return the page."""
    families = table("family", "families", dict)
    formats = table("family and format", "formats", by_format)
    heading = "## Number formats\n\nEngine and trainer compute in the format, emulated; the mean of |Δ log p| over the tokens of a step."
    lines = [INTRODUCTION, "## Model families", "", *families, "", heading, "", *formats, ""]
    engines = [*sglang("dense"), *sglang("moe")]
    if engines:
        lines += [SGLANG, *engines]
    curves = collapse()
    if curves:
        lines += [COLLAPSE, *curves]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
