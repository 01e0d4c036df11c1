"""``miles diff A B``: names the first step, phase, sample, token and tensor in which two runs part."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from miles_core.config.command import CommandParser

if TYPE_CHECKING:
    from miles_tools.replay.compare import Difference
    from miles_tools.replay.stored_run import StoredRun


def run(argv: Sequence[str]) -> int:
    """Run the command; returns 0 if the runs agree in all that both stored, else 1."""
    parser = CommandParser(
        "diff",
        description="Find where two runs part: the first step, its phase (weights, prompt data, rollout, reward, advantage, loss, "
        "gradient, optimizer, sync), sample, token, tensor and plugin. Options and versions that differ are listed first; the verdict "
        "is from stored data. Runs with --record-steps are compared bit for bit and by tensor; others by their metrics, saved samples "
        "and checkpoints. Changes nothing. Exits with 1 on a difference.",
    )
    parser.add_argument("a", metavar="A", help="run directory, the one --save named")
    parser.add_argument("b", metavar="B", help="another run directory")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="T",
        help="relative difference of equal numbers; above 0, checksums of tensors are not compared (default: 0, bit for bit)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_all(argv)
    from miles_tools.replay.compare import find_difference, list_differences
    from miles_tools.replay.stored_run import StoredRun

    a, b = StoredRun(chosen.a), StoredRun(chosen.b)
    found = find_difference(a, b, chosen.tolerance)
    listed = list_differences(a, b)
    if chosen.json:
        part = None if found is None else dataclasses.asdict(found)
        print(json.dumps({"configuration": listed, "difference": part}))
    else:
        _print(a, b, listed, found)
    return 0 if found is None else 1


def _print(a: StoredRun, b: StoredRun, listed: list[tuple[str, str, str]], found: Difference | None) -> None:
    from miles_tools.replay.compare import common_steps
    from miles_tools.replay.steps import describe_steps

    if listed:
        print("options and versions that differ:")
        width = max(len(name) for name, _, _ in listed)
        for name, one, other in listed:
            print(f"  {name:<{width}}  {one} | {other}")
    steps = common_steps(a, b)
    recorded = [step for step in steps if step in a.recorded and step in b.recorded]
    detail = (
        describe_steps(recorded)
        if recorded
        else "none, so tensors are compared in checkpoints only, and the numbers of samples are rounded"
    )
    print(f"compared: {describe_steps(steps)}; recorded by both (--record-steps): {detail}")
    print("the runs agree" if found is None else f"the runs part at {found}")
