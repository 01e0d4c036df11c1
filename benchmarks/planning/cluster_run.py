"""A run under Ray with two Megatron ranks and two SGLang engines, an engine and a rank killed on the way, next to its prediction.

A random mixture of experts (``--size 1b``: 1.1 B parameters, ``large``: 1.9 B) trains with ``r3,tis,fp8,zero_copy``; on two GPUs ranks and
engines take turns (``--colocate``). After ``--kill-engine`` steps the script sends SIGKILL to one engine, after ``--kill-rank`` steps to one
rank. The result has the seconds of each phase (medians of the undisturbed steps), what each kill cost, the memory that the plan predicts and
the GPUs' peaks, and the step that ``miles_planner`` and ``miles simulate`` predict for the lengths that the run saved::

    python benchmarks/planning/cluster_run.py --save

``--separate --schedule async`` has one rank and one engine on GPUs of their own, and responses of long-tailed lengths.

``--size tiny --device cpu`` rehearses it on a machine without GPUs. ``--warm`` runs one step of a model of two layers on one GPU instead, with
the same options of SGLang, so that later runs find compiled kernels.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoints import save_random
from benchmarks.measure import commit, finish, installed, options
from benchmarks.planning.cluster_options import flags_of, make_config, run_options
from benchmarks.planning.cluster_prediction import compare, predict, simulate

#: Metrics of each step that the result keeps.
ROW = (
    "step", "time/step", "time/rollout", "time/train", "time/sync", "time/other", "time/save", "rollout/length_mean",
    "rollout/staleness_mean", "rollout/dropped_groups", "rollout/tokens_per_second",
)  # fmt: skip


def make_model(size: str, directory: Path, layers: int | None = None) -> Path:
    """Save a random checkpoint unless the directory exists; return it."""
    return directory if directory.exists() else save_random(make_config(size, layers), directory)


def parameters_of(checkpoint: Path) -> int:
    """Return the number of parameters of a checkpoint."""
    from miles_core.trainer import CheckpointFiles

    return sum(math.prod(entry.shape) for entry in CheckpointFiles(checkpoint).entries.values())


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of the completed steps."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if "time/step" in row]


class Progress:
    """The steps of a run as they complete, also those that are computed again after a restart.

    Attributes:
        at: seconds since the start at which each step was seen, and its number.
        count: completed steps.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._seen = run, set[float]()
        self.at: list[tuple[float, int]] = []
        self.count = 0

    def look(self, now: float) -> None:
        """Read the metrics."""
        steps = read_steps(self._run)
        self.count = len(steps)
        for row in steps:
            if row["time/step"] not in self._seen:
                self._seen.add(row["time/step"])
                self.at.append((now, int(row["step"])))
                print(f"step {row['step']} after {now} s", file=sys.stderr, flush=True)

    def after(self, kill: dict[str, Any]) -> dict[str, Any]:
        """Return what happened after a kill: seconds until the next step was complete, and its number."""
        later = [(at, step) for at, step in self.at if at > kill["at"]]
        return {"next_step": later[0][1], "complete_after": round(later[0][0] - kill["at"], 1)} if later else {}


def find_worker(run: Path, name: str) -> int | None:
    """Return the process id of a worker from its log, that of the newest process."""
    log = run / "workers" / f"{name}.log"
    found = re.findall(r"process (\d+) on", log.read_text(errors="replace")) if log.exists() else []
    return int(found[-1]) if found else None


def drive(given: Any, command: list[str], run: Path) -> dict[str, Any]:
    """Run the command, kill an engine and a rank on the way; return what happened, with seconds since the start."""
    start, peaks, progress = time.monotonic(), [0, 0], Progress(run)
    kills: list[dict[str, Any]] = []
    todo = [(given.kill_engine, "engine-1"), (given.kill_rank, "trainer-1")]
    todo = [(step, name) for step, name in todo if step and not given.separate and not given.warm]
    log = run.parent / "output.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        while process.poll() is None and time.monotonic() - start < (given.seconds if progress.at else given.first):
            time.sleep(0.25)
            peaks = [max(pair) for pair in zip(peaks, used_memory(), strict=True)]
            now = round(time.monotonic() - start, 1)
            progress.look(now)
            if todo and progress.count >= todo[0][0] and (found := find_worker(run, todo[0][1])) is not None:
                os.kill(found, signal.SIGKILL)
                kills.append({"worker": todo.pop(0)[1], "after_steps": progress.count, "at": now})
                print(f"killed: {kills[-1]}", file=sys.stderr, flush=True)
        if process.poll() is None:
            stop(process)
        progress.look(round(time.monotonic() - start, 1))
    if given.logs:
        given.logs.write_text(read_logs(log, run))
    text = log.read_text(errors="replace")
    notices = [line for line in text.splitlines() if re.search(" (WARNING|ERROR) (?!\\S+: megatron)", line)]
    return {
        "exit": process.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "first_step_after": progress.at[0][0] if progress.at else None,
        "kills": [kill | progress.after(kill) for kill in kills],
        "steps_at": progress.at,
        "peak_gb": [round(peak / 1e9, 2) for peak in peaks],
        "notices": [line[:300] for line in notices][:20],
        "phases": re.findall(r"(\S+ begins [\d.]+ s after the start: .*)", text),
        "end_of_log": text[-3000:] if process.returncode else "",
    }


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill it after 20 seconds."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_logs(log: Path, run: Path) -> str:
    """Return the run's output and the ends of its workers' and engines' logs."""
    found = [f"== output\n{log.read_text(errors='replace')[-200_000:]}"]
    for path in sorted([*run.glob("workers/*"), *run.glob("**/sglang*.log")]):
        found.append(f"== {path.relative_to(run)}\n{path.read_text(errors='replace')[-20_000:]}")
    return "\n".join(found)


def used_memory() -> list[int]:
    """Return the used bytes of the first two GPUs that this process may use, of all processes."""
    if not torch.cuda.is_available():
        return [0, 0]
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [int(line) << 20 for line in done.stdout.split()]
    return ([*found, 0, 0])[:2]


def medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians over the steps, without the first two, which compile."""
    rows = steps[2:] or steps
    names = [
        n
        for n in rows[0]
        if n.startswith(("time/", "mismatch/abs", "r3/", "sync/", "rollout/length_mean")) or n.endswith("per_second")
    ]
    return {name: round(statistics.median(row[name] for row in rows if name in row), 4) for name in names}


def steps_per_minute(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean steps per minute and age of the samples without the first three steps, which compile and fill the buffer."""
    rows = steps[3:] or steps
    found = {"steps_per_minute": 60 * len(rows) / sum(row["time/step"] for row in rows)}
    for name in ("rollout/length_mean", "rollout/staleness_mean", "rollout/dropped_groups"):
        found[name] = statistics.fmean(row.get(name, 0.0) for row in rows)
    return {name: round(value, 3) for name, value in found.items()}


def lost_seconds(steps: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of the steps that took more than twice the median, less the median: what restarts cost."""
    usual = statistics.median(row["time/step"] for row in steps)
    return [round(row["time/step"] - usual, 1) for row in steps[2:] if row["time/step"] > 2 * usual]


def parts_of(given: Any, checkpoint: Path, directory: Path, found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the named parts of the result, which the caller adds to ``found``."""
    flags, run = flags_of(given, checkpoint, directory), directory / "run"
    yield "flags", " ".join(flags).replace(str(directory), "DIR").replace(str(checkpoint), "MODEL")
    yield "run", drive(given, [sys.executable, "-m", "miles_core", "train", *flags], run)
    steps = read_steps(run)
    yield "steps", len(steps)
    if not steps or given.warm:
        return
    yield "seconds_of_steps", [round(row["time/step"], 2) for row in steps]
    yield "medians", medians(steps)
    yield "seconds_of_saves", [round(row["time/save"], 2) for row in steps if "time/save" in row]
    yield "restarts_cost", lost_seconds(steps)
    yield "rows", [{name: round(row[name], 4) for name in ROW if name in row} for row in steps]
    if given.separate:
        yield "steps_per_minute", steps_per_minute(steps)
    try:
        predicted = predict(given, flags, statistics.median(row["rollout/length_mean"] for row in steps))
        yield "predicted", predicted
        yield "simulated", simulate(given, checkpoint, f"replay:{run}", predicted["seconds"], len(steps))
        yield "comparison", compare(found, given.prompts * 8, given.separate)
    except Exception as error:  # a prediction that fails must not lose the measurements
        yield "prediction_failed", f"{type(error).__name__}: {error}"


def main() -> None:
    given = run_options(options(__doc__)).parse_args()
    if given.separate:
        given.tokens = given.long_tokens
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        directory = Path(name)
        checkpoint = make_model(given.size, given.checkpoint or directory / "model", 2 if given.warm else None)
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else "none"
        found: dict[str, Any] = {"gpus": gpus, "commit": commit(), "parameters": parameters_of(checkpoint)}
        for part, value in parts_of(given, checkpoint, directory, found):
            found[part] = value
            print(f"{part}: {json.dumps(value)[:2000]}", file=sys.stderr, flush=True)
            if given.out:
                given.out.write_text(json.dumps(found, indent=1))
    if given.warm:
        return
    variant = f"{given.size}-{given.schedule}" if given.separate else given.size
    finish("cluster_run", found, given.save, lambda: installed("torch", "ray", "sglang", "megatron-core"), variant)


if __name__ == "__main__":
    main()
