"""``miles simulate``: simulates one run, or the same run with several schedules and splits of GPUs, and prints a table."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import cast

from miles_core.config.command import CommandParser
from miles_core.errors import ConfigError
from miles_core.plugin.options import METADATA_KEY, OptionInfo
from miles_planner.packages import read_option
from miles_planner.simulation.options import SimulationConfig

#: Columns of the table: name in the summary -> (heading, format).
COLUMNS = {
    "seconds_per_step": ("s/step", "{:.1f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "tokens_per_second_per_gpu": ("per GPU", "{:.0f}"),
    "gpu_busy": ("GPUs busy", "{:.0%}"),
    "engine_busy": ("engines", "{:.0%}"),
    "trainer_busy": ("trainer", "{:.0%}"),
    "running": ("running", "{:.1f}"),
    "staleness_mean": ("staleness", "{:.2f}"),
    "staleness_max": ("max", "{:.0f}"),
    "stale_tokens": ("stale tokens", "{:.0%}"),
    "dropped_groups": ("dropped", "{:.0f}"),
    "tokens_generated_per_trained": ("generated/trained", "{:.2f}"),
    "failures": ("failures", "{:.0f}"),
}


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    chosen, words, command = _parser().parse_own(argv)
    from miles_planner.simulation.simulation import Simulated, simulate

    if chosen.splits:
        _check_total(chosen.splits, words)
    results: list[Simulated] = []
    for name, schedule, split in _cases(chosen.compare, chosen.splits):
        with _ProgressLine(name) as line:
            results.append(simulate(words, name, line.report, replace(command, after=(*schedule, *split))))
    if chosen.plot:
        from miles_planner.simulation.plots import draw

        draw(results, Path(chosen.plot))
    if chosen.json:
        found = [
            {"name": r.name, **r.summary(), "steps": r.seconds, "wall_seconds": round(r.wall, 2), "assumed": r.assumed}
            for r in results
        ]
        print(json.dumps({"simulated": found}))
    else:
        print("\n".join((*dict.fromkeys(line for r in results for line in r.assumed), "")))
        print(format_table([(r.name, r.summary()) for r in results]))
        if chosen.plot:
            print(f"plot: {Path(chosen.plot).resolve()}")
    return 0


def format_table(rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    """Format one line per simulation. Columns whose values are all 0 are left out."""
    shown = [name for name in COLUMNS if any(summary[name] for _, summary in rows)]
    heads = ["", *(COLUMNS[name][0] for name in shown)]
    lines = [[label, *(COLUMNS[name][1].format(summary[name]) for name in shown)] for label, summary in rows]
    widths = [max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            word.ljust(w) if not i else word.rjust(w) for i, (word, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in (heads, *lines)
    )


def _cases(compare: str | None, splits: str | None) -> list[tuple[str, list[str], list[str]]]:
    """Return (name, flags of the schedule, flags of the split) of every simulation."""
    names = [name.strip() for name in compare.split(",")] if compare is not None else []
    if "" in names:
        raise ConfigError(f"--compare {compare!r}: an entry is empty; write schedules, for example sync,ahead")
    schedules = [(name, ["--schedule", *name.split()]) for name in names] or [("", [])]
    places = [(text, _split_flags(text)) for text in splits.split(",")] if splits else [("", [])]
    return [(" ".join(filter(None, (a, b))), flags, place) for (a, flags), (b, place) in product(schedules, places)]


def _split_flags(text: str) -> list[str]:
    """Convert ``ENGINES+TRAINER`` to flags."""
    engines, plus, trainer = text.partition("+")
    if not plus or not engines.isdigit() or not trainer.isdigit():
        raise ConfigError(f"--splits {text}: write GPUs of engines + GPUs of the trainer, for example 96+32")
    return ["--engine-gpus", engines, "--trainer-gpus", trainer]


def _check_total(splits: str, words: Sequence[str]) -> None:
    """Refuse a split of more or fewer GPUs than ``--engine-gpus`` and ``--trainer-gpus`` together, if ``words`` contain both."""
    given = [read_option(words, flag) for flag in ("--engine-gpus", "--trainer-gpus")]
    if not all(text and text.isdigit() for text in given):
        return
    total = sum(map(int, filter(None, given)))
    for text in splits.split(","):
        _, engines, _, trainer = _split_flags(text)
        if int(engines) + int(trainer) != total:
            raise ConfigError(
                f"--splits {text}: this is {int(engines) + int(trainer)} GPUs, but --engine-gpus {given[0]} and --trainer-gpus {given[1]} are "
                f"{total}; correct it, or leave these two out"
            )


class _ProgressLine:
    """Shows the steps of a simulation on a terminal; otherwise nothing is shown."""

    def __init__(self, name: str) -> None:
        self.name, self.shown = name or "simulation", sys.stderr.isatty()
        self._start = self._last = time.monotonic()

    def __enter__(self) -> _ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def report(self, done: int, seconds: float) -> None:
        """Show the completed steps and the virtual time, at most five times per second."""
        now = time.monotonic()
        if self.shown and now - self._last > 0.2:
            self._last = now
            text = f"{self.name}: {done} steps, {seconds:,.0f} virtual seconds, {now - self._start:.0f} s"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _parser() -> CommandParser:
    parser = CommandParser(
        "simulate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.fill(
            "Simulate a run on a virtual clock with the real loop, schedules and collector, and report utilization, tokens per second "
            "and staleness. Takes the flags of miles train about schedules and batches (--schedule, --rollout-batch-size, "
            "--n-samples-per-prompt, --num-rollout, --rollout-max-response-len, --max-weight-staleness, --partial-rollout, --colocate, "
            "--max-running-requests, ...), and those below.",
            110,
        ),
        epilog="lengths, GPUs, speeds and failures:\n" + _describe_options(),
    )
    parser.add_argument(
        "--compare",
        metavar="SCHEDULE,...",
        help="simulate each schedule; flags may follow a name: 'sync,async --partial-rollout'",
    )
    parser.add_argument("--splits", metavar="ENGINES+TRAINER,...", help="simulate each split of GPUs: 96+32,64+64")
    parser.add_argument("--plot", metavar="FILE", help="draw the results (PNG, SVG or PDF)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def _describe_options() -> str:
    lines = []
    for each in fields(SimulationConfig):
        info = cast(OptionInfo, each.metadata[METADATA_KEY])
        default = "" if each.default in (None, True, False) else f" (default: {each.default})"
        text = textwrap.wrap(info.help + default, 78)
        head = f"  {info.flag} {info.metavar}".rstrip()
        lines += [f"{head:<34}{text[0]}" if len(head) < 34 else f"{head}\n{'':34}{text[0]}"]
        lines += [f"{'':34}{more}" for more in text[1:]]
    return "\n".join(lines)
