"""``miles simulate`` against real runs with SGLang and Megatron: from a run with ``sync`` it predicts those with ``ahead`` and ``async``.

Reads results of ``cluster_run.py --separate`` (one rank and one engine on separate GPUs, log-normal lengths cut at ``--long-tokens``). The steps
of ``sync`` after the first three give the speeds, by least squares: seconds of a decode step, which one response of the longest length in
nearly every rollout makes ``longest`` times, and seconds per generated token; seconds per training step; and the median sync. Training is
constant because a step always has the same number of samples. The other schedules are simulated with these speeds and compared by steps per
minute. No GPU is needed::

    python benchmarks/planning/cluster_schedules.py sync.json ahead.json async.json --save
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from benchmarks.planning.cluster_options import make_config
from benchmarks.planning.simulate_real import solve

#: Steps that compile, or fill a buffer.
FIRST = 3
SAMPLES, PROMPT = 8, 64


def read_flag(run: dict[str, Any], name: str) -> str:
    """Return the value of an option of the run."""
    flags = run["flags"].split()
    return str(flags[flags.index(name) + 1])


def fit(sync: dict[str, Any], directory: Path) -> list[str]:
    """Return the speeds of a run with ``sync`` as options of ``miles simulate``."""
    rows, longest = sync["rows"][FIRST:], int(read_flag(sync, "--rollout-max-response-len"))
    count = int(read_flag(sync, "--rollout-batch-size")) * SAMPLES
    step, token = solve(
        [[longest, count * row["rollout/length_mean"]] for row in rows], [row["time/rollout"] for row in rows]
    )
    curve = directory / "curve.json"
    curve.write_text(json.dumps({"batches": [1, count], "seconds": [step + token, step + count * token]}))
    rest = [row["time/step"] - row["time/rollout"] - row["time/sync"] for row in rows]
    speeds = {
        "--decode-curve": curve,
        "--prefill-seconds-per-token": 0,
        "--train-seconds-per-step": statistics.median(rest),
        "--train-seconds-per-token": 0,
        "--sync-seconds": statistics.median(row["time/sync"] for row in rows),
    }
    return [text for name, value in speeds.items() for text in (name, str(value))]


def simulate(run: dict[str, Any], config: Path, speeds: list[str], steps: int) -> dict[str, float]:
    """Return what ``miles simulate`` reports for the schedule of a run."""
    schedule, longest = read_flag(run, "--schedule"), read_flag(run, "--rollout-max-response-len")
    late = ["--max-weight-staleness", "2", "--stale-samples", "train"] if schedule == "async" else []
    command = [
        sys.executable, "-m", "miles_core", "simulate", "--json", "--model-config", str(config), "--engine-gpus", "1", "--trainer-gpus", "1",
        "--rollout-batch-size", read_flag(run, "--rollout-batch-size"), "--n-samples-per-prompt", str(SAMPLES),
        "--rollout-max-response-len", longest, "--num-rollout", str(steps), "--lengths", f"lognormal:{int(longest) / 6:g},1.0",
        "--prompt-lengths", f"constant:{PROMPT}", "--schedule", schedule, *late, *speeds,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise SystemExit(f"miles simulate failed: {done.stderr[-800:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1])["simulated"][0])


def summarize(run: dict[str, Any]) -> dict[str, float]:
    """Return the mean steps per minute and staleness after the first steps."""
    rows = run["rows"][FIRST:]
    return {
        "steps": len(rows),
        "steps_per_minute": 60 * len(rows) / sum(row["time/step"] for row in rows),
        "staleness": statistics.fmean(row.get("rollout/staleness_mean", 0.0) for row in rows),
        "length": statistics.fmean(row["rollout/length_mean"] for row in rows),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="results of cluster_run.py; the first one with sync")
    parser.add_argument("--steps", type=int, default=200, help="simulated steps")
    given = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in given.runs]
    if read_flag(runs[0], "--schedule") != "sync":
        parser.error("the first result must be that of a run with sync")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_config("1b").save_pretrained(directory)
        speeds = fit(runs[0], directory)
        curve = json.loads((directory / "curve.json").read_text())
        for run in runs:
            real, found = summarize(run), simulate(run, directory / "config.json", speeds, given.steps)
            predicted = 60 / found["seconds_per_step"]
            row: dict[str, Any] = {"schedule": read_flag(run, "--schedule"), "gpus": run["gpus"], "measured": real}
            row |= {"simulated": {"steps_per_minute": predicted, "staleness": found["staleness_mean"]}}
            row |= {"error": predicted / real["steps_per_minute"] - 1}
            rows.append(json.loads(json.dumps(row), parse_float=lambda text: round(float(text), 4)))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {"speeds": {"curve": curve, "options": speeds[2:]}, "rows": rows}
    finish("cluster_schedules", result, given.save, lambda: installed("miles-core"))


if __name__ == "__main__":
    main()
