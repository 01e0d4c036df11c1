"""``miles report RUN``: writes a run's report and prints its path; with several runs, their comparison."""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.config.command import CommandParser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = CommandParser(
        "report",
        description="Write RUN/report.html (the page of miles watch as one file, with some of the samples) and RUN/report/*.png, and print "
        "the file's path. Works while the run is going on, too. With several runs, write one page that compares them: the "
        "options that differ, plots with bands over seeds, and the last value of every metric.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directory, the one --save named")
    parser.add_argument(
        "--output", metavar="FILE", help="file of a comparison (default: compare.html in the current directory)"
    )
    chosen = parser.parse_all(argv)
    if len(chosen.runs) > 1:
        from miles_tools.report.report import COMPARISON, compare

        print(compare(chosen.runs, chosen.output or COMPARISON).resolve())
        return 0
    if chosen.output:
        why = "--output is for a comparison of several runs; a report is written to RUN/report.html"
        raise parser.refuse(why, chosen.runs)
    from miles_tools.report.report import report

    print(report(chosen.runs[0]).resolve())
    return 0
