"""``miles report RUN``: writes a run's report and prints its path."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="miles report",
        description="Write RUN/report.html (one file with all plots) and RUN/report/*.png, and print the file's path. "
        "Works while the run is going on, too.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, the one --save named")
    chosen = parser.parse_args(argv)
    from miles_tools.report.report import report

    print(report(chosen.run).resolve())
    return 0
