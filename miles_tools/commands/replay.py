"""``miles replay RUN --step N``: repeats the training of a recorded step and compares the result with the record."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from miles_core.config.command import CommandParser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns 0 if the repeated step agrees with the recorded one, else 1."""
    parser = CommandParser(
        "replay",
        description="Repeat the training of a step that a run recorded (--record-steps), from the checkpoint before it or the nearest "
        "earlier one, and print what agrees: loss, gradient norm, metrics and checksums of gradients and weights. On a CPU, and with "
        "--embedded-deterministic on a GPU, the results are compared bit for bit. RUN is not changed. Exits with 1 on a difference.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, the one --save named")
    parser.add_argument("--step", type=int, metavar="N", help="the step to repeat, from 1")
    parser.add_argument("--save", metavar="DIR", help="keep the repeated run in this directory")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="relative difference of equal numbers (default: 0 on a CPU and with --embedded-deterministic, else 0.01)",
    )
    chosen = parser.parse_all(argv)
    if chosen.step is None:
        raise parser.refuse("miles replay needs --step N (the step to repeat, from 1)", [chosen.run, "--step", "1"])
    from miles_tools.replay.again import repeat_step

    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="miles-replay-") as temporary:
        target = Path(chosen.save) if chosen.save else Path(temporary) / "run"
        done = repeat_step(chosen.run, chosen.step, target, chosen.tolerance)
    start = f"the checkpoint of step {done.start}" if done.start else "the initial weights"
    print(f"step {done.step} of {chosen.run}, repeated from {start} in {time.perf_counter() - started:.1f} s")
    width = max(len(row[0]) for row in done.rows)
    print(f"  {'':<{width}}  recorded | repeated")
    for name, recorded, repeated, agrees in done.rows:
        print(f"  {name:<{width}}  {recorded} | {repeated}  {'equal' if agrees else 'DIFFERENT'}")
    how = f"within a relative {done.tolerance:g}" if done.tolerance else "bit for bit"
    if done.difference is None and all(row[3] for row in done.rows):
        print(f"the repeated step agrees {how}")
        return 0
    print(f"the repeated step differs: {done.difference or 'see above'}")
    return 1
