"""Does ``miles diff`` name what differs between two runs, and does it find nothing in equal runs?

Twenty pairs of toy runs with one planted difference (``planted_differences``), and ten pairs of equal runs with different options, all with
``--record-steps``. A difference counts as named if step, phase and, where expected, sample, token, tensor or plugin are right. Prints the
table on standard error; the exit code is 1 unless 20 of 20 are named and 0 of 10 equal pairs differ. Takes some minutes on two cores.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from benchmarks.project.planted_differences import EQUAL, PLANTED, Planted
from miles_tools.replay.compare import Difference, find_difference, list_differences
from miles_tools.replay.stored_run import StoredRun


def is_named(planted: Planted, found: Difference | None, listed: list[tuple[str, str, str]]) -> bool:
    """Whether the difference is what was planted."""
    if not planted.phase:
        return found is None and len(listed) == 1
    if found is None or found.phase != planted.phase or found.step not in planted.steps:
        return False
    seen = {"sample": found.sample, "token": found.token, "tensor": found.tensor, "tensors": found.tensors[0]}
    for name, expected in planted.holds.items():
        if name == "plugins":
            if expected not in found.plugins:
                return False
        elif not (
            isinstance(seen[name], expected) and seen[name] != ""
            if isinstance(expected, type)
            else seen[name] == expected
        ):
            return False
    return True


def compare(a: Path, b: Path) -> tuple[Difference | None, list[tuple[str, str, str]]]:
    """Return what ``miles diff`` finds, and the options and versions that differ."""
    one, other = StoredRun(a), StoredRun(b)
    return find_difference(one, other), list_differences(one, other)


def measure_planted(name: str, folder: Path) -> dict[str, Any]:
    """Make one pair, and compare it."""
    planted = PLANTED[name]
    a, b = (side.run(folder / label) for side, label in zip(planted.sides(folder), "ab", strict=True))
    started = time.perf_counter()
    found, listed = compare(a, b)
    seconds = time.perf_counter() - started
    return {"named": is_named(planted, found, listed), "found": str(found), "seconds": round(seconds, 3)}


def measure_equal(name: str, folder: Path) -> dict[str, Any]:
    """Make one pair of equal runs, and compare it."""
    a, b = (EQUAL[name].run(folder / label) for label in "ab")
    found, _ = compare(a, b)
    return {"false": found is not None, "found": str(found)}


def main() -> int:
    given = options(__doc__).parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for kind, names, measure in (("planted", PLANTED, measure_planted), ("equal", EQUAL, measure_equal)):
        for name in names:
            with tempfile.TemporaryDirectory(prefix="miles-diff-") as folder:
                rows[f"{kind}: {name}"] = row = measure(name, Path(folder))
            print(f"{kind}: {name:<40} {row}", file=sys.stderr, flush=True)
    named = sum(row.get("named", False) for row in rows.values())
    false = sum(row.get("false", False) for row in rows.values())
    result = {"named": f"{named} of {len(PLANTED)}", "false": f"{false} of {len(EQUAL)}", "pairs": rows}
    finish("diff_runs", result, given.save, lambda: installed("miles-core", "torch"))
    return int(named < len(PLANTED) or false > 0)


if __name__ == "__main__":
    sys.exit(main())
