"""List every test that no run of a checkout could execute, with its reason.

Run ``python tests/skipped.py DIRECTORY`` after pytest wrote ``--junit-xml`` files there, as ``make test`` and ``make test-engines`` do. A test
counts if at least one file has it and each of these skipped it. The reasons are the rows of ``docs/skipped-tests.md``; the exit code is 1 if a test
was skipped for another one, so nothing drops out of the tests unnoticed.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as xml
from collections import Counter, defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "skipped-tests.md"


def read_skipped(files: Iterable[Path]) -> dict[tuple[str, str], str]:
    """Return (module or class, test) -> reason, of the tests that every file which has them skipped."""
    reasons: dict[tuple[str, str], str] = {}
    executed: set[tuple[str, str]] = set()
    for file in files:
        for case in xml.parse(file).iter("testcase"):
            test = (case.get("classname", ""), case.get("name", ""))
            skipped = case.find("skipped")
            if skipped is None:
                executed.add(test)
            else:
                reasons[test] = skipped.get("message", "").removeprefix("Skipped: ")
    return {test: reason for test, reason in reasons.items() if test not in executed}


def listed_patterns(page: str) -> list[str]:
    """Return the reasons in the first column of the page's table, in which ``*`` matches anything."""
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def main(directory: Path) -> int:
    """Print the skipped tests by reason; return the exit code."""
    files = sorted(directory.glob("*.xml"))
    if not files:
        print(f"{directory}: no *.xml files; run make test first", file=sys.stderr)
        return 1
    patterns = listed_patterns(PAGE.read_text(encoding="utf-8"))
    modules: dict[str, Counter[str]] = defaultdict(Counter)
    for (module, _), reason in read_skipped(files).items():
        pattern = next((p for p in patterns if fnmatchcase(reason, p)), f"NOT LISTED: {reason}")
        modules[pattern][module] += 1
    print(f"skipped in {', '.join(file.stem for file in files)}: {sum(c.total() for c in modules.values())} tests")
    for pattern, counts in sorted(modules.items(), key=lambda item: -item[1].total()):
        print(f"{counts.total():5d}  {pattern}")
        for module, count in sorted(counts.items()):
            print(f"       {count:5d}  {module}")
    unlisted = [pattern for pattern in modules if pattern.startswith("NOT LISTED")]
    if unlisted:
        print(
            f"{len(unlisted)} reasons are not in {PAGE.name}: add a row that says where these tests run",
            file=sys.stderr,
        )
    return bool(unlisted)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
