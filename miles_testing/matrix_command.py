"""``miles plugins matrix``: tries every pair of installed plugins and writes the page about them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from miles_core.plugin.discovery import discover
from miles_testing.matrix import HARDWARE, Outcome, attempt_all, list_combinations, read, write

_PAGE = f"""# Which plugins work together

Every pair of installed plugins in a toy run of two steps on a CPU, written by
`miles plugins matrix --save docs/compatibility.jsonl --markdown > docs/compatibility.md`. The same command on your machine includes your own
plugins; `--only NAME` tries one plugin with all others. A plugin states what it needs on a tiny model in its manifest (`toy`).

The number after a plugin is the gap: the largest mean absolute difference of log-probabilities between engine and trainer in a step, in nats
per token (0 is below 1e-5). Number formats are tried in their first pair of precisions, emulated. Pairs with an engine, trainer or runtime
other than the embedded ones are planned for {HARDWARE} and not run.
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns 1 if a combination failed."""
    options = _parser().parse_args(list(argv))
    manifests = discover()
    wanted = list_combinations(manifests, [name for name in options.only.split(",") if name])
    versions = {name: manifests[name].version for names in wanted for name in names}
    stored = {tuple(each.plugins): each for each in (read(options.save) if options.save else [])}
    done = {
        names: stored[names]
        for names in wanted
        if names in stored and stored[names].plugins == {name: versions[name] for name in names}
    }
    missing = [names for names in wanted if names not in done]
    start = time.monotonic()
    for number, outcome in enumerate(attempt_all(missing, manifests, options.workers), 1):
        done[tuple(outcome.plugins)] = outcome
        if options.save:
            write(options.save, {**stored, **done}.values())
        left = (time.monotonic() - start) / number * (len(missing) - number)
        print(f"[{number}/{len(missing)}, {_duration(left)} left] {outcome.title}: {outcome.text}", file=sys.stderr)
    outcomes = [done[names] for names in wanted]
    if options.save:
        gone = stored.keys() - set(list_combinations(manifests))
        others = [each for names, each in stored.items() if names not in done and names not in gone]
        write(options.save, sorted([*others, *outcomes], key=lambda each: (len(each.plugins), *each.plugins)))
    print(_format(outcomes, options))
    return 1 if any(each.result == "fails" for each in outcomes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miles plugins matrix",
        allow_abbrev=False,
        description="Try every installed plugin and every pair of them in a toy run on this machine: it works (with the gap "
        "between engine and trainer), the plan refuses it (with the reason), or it fails. Pairs with a backend are planned only.",
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="pairs with this plugin, or among several")
    parser.add_argument("--workers", type=_positive, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE.jsonl",
        help="store outcomes; pairs that it contains for the installed versions are not tried again",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the page of the documentation")
    form.add_argument("--json", action="store_true", help="print a JSON list")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _format(outcomes: Sequence[Outcome], options: argparse.Namespace) -> str:
    if options.json:
        return json.dumps([dataclasses.asdict(each) for each in outcomes], indent=1)
    if options.markdown:
        return render(outcomes).rstrip()
    lines = [f"{each.title}: {each.text}" for each in outcomes if each.result in ("refused", "fails")]
    return "\n".join([*lines, _summary(outcomes)])


def _summary(outcomes: Iterable[Outcome]) -> str:
    counts = Counter(each.result for each in outcomes)
    names = {
        "works": "work",
        "planned": "are accepted by the plan",
        "refused": "are refused with a reason",
        "fails": "fail",
    }
    return f"{sum(counts.values())} combinations: " + ", ".join(f"{counts[key]} {text}" for key, text in names.items())


def render(outcomes: Sequence[Outcome]) -> str:
    """Return the page of these outcomes, in Markdown."""
    parts = [_PAGE, f"{_summary(outcomes)}.\n"]
    parts += [
        "## Works\n",
        _table("plugin | alone | with", _rows([each for each in outcomes if each.result == "works"])),
    ]
    planned = [each for each in outcomes if each.result == "planned"]
    parts += ["## Accepted by the plan\n", _table("plugin | alone | with", _rows(planned))]
    for title, result in (("Refused", "refused"), ("Fails", "fails")):
        by_reason: dict[str, list[str]] = {}
        for each in outcomes:
            if each.result == result:
                by_reason.setdefault(each.reason, []).append(each.title)
        rows = [f"{', '.join(pairs)} | {reason.replace('|', '/')}" for reason, pairs in by_reason.items()]
        parts += [f"## {title}\n", _table("plugins | reason", rows)] if rows else []
    return "\n".join(parts)


def _table(heads: str, rows: Iterable[str]) -> str:
    rule = "|".join("---" for _ in heads.split("|"))
    return "".join(f"{line}\n" for line in (f"| {heads} |", f"|{rule}|", *(f"| {row} |" for row in rows)))


def _rows(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """Yield a row for each plugin: its gap alone, and those of its pairs with plugins that have no row above."""
    for name in dict.fromkeys(next(iter(each.plugins)) for each in outcomes):
        own = [each for each in outcomes if next(iter(each.plugins)) == name]
        alone = ", ".join(_gap(each) or "yes" for each in own if len(each.plugins) == 1)
        pairs = [f"{list(each.plugins)[1]} {_gap(each)}".strip() for each in own if len(each.plugins) == 2]
        yield f"{name} | {alone} | {', '.join(pairs)}"


def _gap(outcome: Outcome) -> str:
    if outcome.gap is None:
        return ""
    return f"{outcome.gap:.0e}" if outcome.gap >= 1e-5 else "0"
