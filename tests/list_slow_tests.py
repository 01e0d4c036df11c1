"""Writes ``tests/slow_tests.txt`` from the report of a complete run: ``python tests/list_slow_tests.py build/reports/all.xml``.

A test in the list has the marker ``thorough`` (``conftest.py``), so ``make test`` leaves it out. In each file the fastest of the slow tests stay,
so that every part is run.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "slow_tests.txt"
#: Seconds of a slow test, and of the slow tests that stay in a file, together.
SLOW, KEPT = 0.8, 2.0


def read_seconds(report: Path) -> dict[str, dict[str, float]]:
    """Return file -> name of a test, with its class and parameters -> seconds."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        parts = case.attrib["classname"].split(".")
        while parts and not (ROOT / Path(*parts)).with_suffix(".py").is_file():
            parts.pop()
        file = str(Path(*parts).with_suffix(".py"))
        classes = case.attrib["classname"].split(".")[len(parts) :]
        found[file]["::".join([*classes, case.attrib["name"]])] = float(case.attrib["time"])
    return found


def choose(seconds: dict[str, float]) -> list[str]:
    """Return the tests of a file that are left out of a short run. A function with all of its parameters is one entry."""
    slow, kept = set(), 0.0
    for name, time in sorted(seconds.items(), key=lambda each: each[1]):
        if time >= SLOW and kept + time > KEPT:
            slow.add(name)
        elif time >= SLOW:
            kept += time
    functions = {name.partition("[")[0] for name in seconds}
    whole = {f for f in functions if all(name in slow for name in seconds if name.partition("[")[0] == f)}
    return sorted({name.partition("[")[0] if name.partition("[")[0] in whole else name for name in slow})


def main() -> None:
    """Write the list."""
    lines = [
        f"{file}::{name}"
        for file, seconds in sorted(read_seconds(Path(sys.argv[1])).items())
        for name in choose(seconds)
    ]
    LIST.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} slow tests or groups of them")


if __name__ == "__main__":
    main()
