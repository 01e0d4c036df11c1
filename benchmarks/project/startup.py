"""Start-up time of the command line: wall-clock medians of whole processes; the last line is one JSON object.

It measures ``miles --help``, ``miles train --help`` and ``miles plan``, without and with a model; ``tests/cli/test_imports.py`` counts what these
import. With ``--parsers`` also what other ways to
parse the same options cost (tyro must be installed for that).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MILES = "import sys; from miles_core.cli.main import main; sys.exit(main({words!r}))"
CHECKPOINT = ROOT / "tests" / "published" / "qwen3-4b.json"
COMMANDS = {
    "miles --help": MILES.format(words=["--help"]),
    "miles train --help": MILES.format(words=["train", "--help"]),
    "miles plan": MILES.format(words=["plan"]),
    "miles plan --hf-checkpoint": MILES.format(words=["plan", "--hf-checkpoint", "MODEL"]),
}
TYRO = """
import dataclasses, tyro
from miles_core.config.groups import GROUPS
tables = [(name, group, dataclasses.field(default_factory=group)) for name, group in GROUPS.items()]
tyro.cli(dataclasses.make_dataclass("Config", tables), args={words!r})
"""
PARSERS = {
    "python, nothing imported": "pass",
    "import argparse": "import argparse",
    "import pydantic": "from pydantic import TypeAdapter",
    "import tyro": "import tyro",
    "argparse from the schema, help": (
        "from miles_core.config.flags import build_parser; from miles_core.config.schema import collect;"
        "build_parser(collect([])).format_help()"
    ),
    "argparse from the schema, parse and check with pydantic": (
        "from miles_core.config.load import load; load(['--lr', '1e-5', '--rollout-top-k', '5'], manifests=[])"
    ),
    "tyro on the same dataclasses, help": TYRO.format(words=["--help"]),
    "tyro on the same dataclasses, parse": TYRO.format(words=["--train.lr", "1e-5", "--rollout.top-k", "5"]),
}


def seconds_of(code: str, repeats: int) -> dict[str, float]:
    """Median and best wall time of a fresh interpreter running ``code``; the first run, which compiles, is left out."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
        times.append(time.perf_counter() - start)
        if done.returncode:
            sys.exit(f"benchmark failed (exit code {done.returncode}): {code}\n{done.stderr}")
    return {"median": round(statistics.median(times[1:]), 4), "best": round(min(times[1:]), 4)}


def processor() -> str:
    """The processor's name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{len(os.sched_getaffinity(0)) if names else os.cpu_count()} x {names[0] if names else platform.processor()}"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--parsers", action="store_true")
    given = arguments.parse_args()
    folder = tempfile.TemporaryDirectory()
    shutil.copy(CHECKPOINT, Path(folder.name) / "config.json")
    measured = {**COMMANDS, **(PARSERS if given.parsers else {})}
    seconds = {}
    for name, code in measured.items():
        seconds[name] = seconds_of(code.replace("MODEL", folder.name), given.repeats)
        print(f"{seconds[name]['median']:7.3f} s (best {seconds[name]['best']:.3f})  {name}", flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    result = {
        "benchmark": "startup",
        "date": date.today().isoformat(),
        "commit": commit,
        "python": platform.python_version(),
        "hardware": processor(),
        "load_average": round(os.getloadavg()[0], 1),
        "repeats": given.repeats,
        "seconds": seconds,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
