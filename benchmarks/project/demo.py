"""Seconds of ``miles demo``, by phase: whole processes one after the other, from their start to their end.

The first run on a GPU also compiles kernels, which later runs find on the disk. Phases: ``until_plan`` (imports, plan, model and data),
``until_first_step`` (trainer, engine, first sync, evaluation; without the supervised steps), ``warm_start``, ``steps`` with its phases
(sums over all steps), and ``after_steps`` (checkpoint, report). Arguments after ``--`` go to the demo. The last line is one JSON object.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import finish, installed, options


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("arguments", nargs="*", help="arguments of the demo")
    given = parser.parse_args()
    runs = []
    for number in range(given.runs):
        with tempfile.TemporaryDirectory() as directory:
            runs.append(measure(Path(directory) / "run", given.arguments))
        print(f"run {number + 1}/{given.runs}: {json.dumps(runs[-1])}", file=sys.stderr, flush=True)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    finish(
        "demo", {"device": device, "runs": runs}, given.save, lambda: installed("torch", "transformers"), given.variant
    )


def measure(directory: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the demo once."""
    command = [sys.executable, "-m", "miles_core.cli.main", "demo", "--json", "--dir", str(directory), *arguments]
    begun, started = time.perf_counter(), datetime.now()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"miles demo ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    outcome = json.loads(done.stdout.splitlines()[-1])
    log = (directory / "run.log").read_text()
    planned, first, last = (
        (stamp - started).total_seconds()
        for stamp in (at(log, "run directory: "), at(log, r"step 1 begins "), at(log, "finished; "))
    )
    warm_start = outcome["seconds_warm_start"]
    phases = {"until_plan": planned, "until_first_step": first - planned - warm_start, "warm_start": warm_start}
    phases |= {"steps": last - first, "after_steps": wall - last}
    found = {"seconds": wall, **phases}
    rounded = {name: round(seconds, 2) for name, seconds in found.items()}
    return rounded | {
        "phases_of_steps": sums(directory),
        "accuracy": [outcome["accuracy_before"], outcome["accuracy_after"]],
    }


def at(log: str, text: str) -> datetime:
    """Return the time of the first line of the log with the text."""
    match = re.search(rf"^(\S+ [\d:]+),(\d+) .*{text}", log, re.MULTILINE)
    assert match is not None, f"no line with {text!r} in:\n{log}"
    return datetime.fromisoformat(f"{match[1]}.{match[2]}")


def sums(directory: Path) -> dict[str, float]:
    """Return the sum of each phase over the steps."""
    total: dict[str, float] = {}
    for record in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        for name, value in record.items():
            if record["step"] > 0 and name.startswith("time/") and name != "time/step":
                total[name.removeprefix("time/")] = total.get(name.removeprefix("time/"), 0.0) + value
    return {name: round(seconds, 2) for name, seconds in total.items()}


if __name__ == "__main__":
    main()
