"""Workers and drivers that are killed in every phase of a run under Ray: is every prompt trained on exactly once, and how long does it take?

A plugin file kills engine, trainer rank or driver (SIGKILL) when a step reaches a phase, and writes the prompts that the rank was given
into a file of its own, which no checkpoint rolls back. Of a step that was repeated the last time counts, as it does for the weights.
A killed driver is started again by hand, as a person would (``--load``), and must leave no process behind.

The kills of a victim in a phase are divided over runs, ``--jobs`` of which go on at a time, each with a Ray cluster of its own. After
``--seconds`` the script kills no more processes and the runs end. What each run found is a line of ``--log`` as soon as it ends,
and runs that are in it already count, so that the matrix can be made in several sittings.
``--anytime N`` inflicts N kills and stops at random moments instead, also during pushes, builds, saves and recoveries. With it, a run that
has not ended after ``--seconds`` is stopped and only counted as such, and no fault happens in the last minute. The result file of ``--save``
is written again after every run, so an interrupted measurement keeps its counts. Neither git nor installed packages are needed: the
checkout and its plugins may be on PYTHONPATH.
Run: ``python benchmarks/scale/faults.py --kills 20 --save`` (an hour and a half on two cores; ``--kills 1``: five minutes; with
``--jobs 24 --kills-a-run 5`` some minutes on 32 cores), and on 16 cores
``python benchmarks/scale/faults.py --anytime 500 --jobs 14 --seconds 520 --log FILE --save``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from benchmarks.scale.checkout import register
from benchmarks.scale.faults_anytime import HEARTBEAT, STALL, Campaign, Limits, Shape, many, read_lines
from miles_testing.toy import toy_arguments, toy_files

VICTIMS = ("engine", "rank", "driver")
PHASES = ("rollout", "train", "sync", "save", "evaluation")
GROUPS, SAMPLES = 2, 4
SUMS = ("kills", "lost", "doubled", "repeated_steps", "left_behind", "failed")
#: Held by who starts a run, or writes down what one found.
STARTS = threading.Lock()
FIRST, GAP = 2, 2  # the step of the first kill, when a checkpoint is there, and from one to the next

PLUGIN = r"""
import json, os, re, signal, time
from pathlib import Path
from miles_core.plugin import hookimpl

HERE = Path(__file__).parent
VICTIM, PHASE, DEADLINE = json.loads((HERE / "fault.json").read_text())

def reached(run, phase):
    steps = json.loads((HERE / "steps.json").read_text())
    if phase != PHASE or run.step not in steps or time.time() > DEADLINE:
        return
    steps.remove(run.step)
    (HERE / "steps.json").write_text(json.dumps(steps))
    if VICTIM == "driver":
        number = int((HERE / "driver").read_text())
    else:
        log = run.directory / "workers" / ("engine-0.log" if VICTIM == "engine" else "trainer-0.log")
        number = int(re.findall(r"process (\d+) on", log.read_text())[-1])
    with (HERE / "kills.jsonl").open("a") as file:
        file.write(json.dumps([run.step, time.time()]) + "\n")
    os.kill(number, signal.SIGKILL)

@hookimpl
def on_sample(run, sample):
    reached(run, "evaluation" if sample.metadata.get("held_out") else "rollout")

@hookimpl
def on_batch(run, batch):
    prompts = batch.tokens[batch.starts].tolist()
    with (HERE / "trained.jsonl").open("a") as file:
        file.write(json.dumps([run.step, sorted(zip(batch.group.tolist(), prompts))]) + "\n")
    reached(run, "train")

@hookimpl
def wrap_weights(run):
    def wrap(inner):
        def weights():
            reached(run, "sync")
            yield from inner()
        return weights
    return wrap

@hookimpl
def on_save(run, policy):
    if policy is not None:
        reached(run, "save")
"""


@dataclass(frozen=True)
class Task:
    """One run in which ``victim`` is killed in ``phase``, ``kills`` times if that can be before ``deadline``."""

    victim: str
    phase: str
    kills: int
    deadline: float


def prepare(directory: Path, task: Task) -> tuple[list[str], int]:
    """Everything a run needs on disk; its command and how many steps it has."""
    victim, phase, kills = task.victim, task.phase, task.kills
    steps = GAP * kills + FIRST + 1
    letters = [chr(ord("a") + n % 26) + str(n // 26) for n in range(GROUPS * steps)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"input": text}) + "\n" for text in letters))
    held = {"input": "z", "metadata": {"held_out": True}}
    (directory / "held_out.jsonl").write_text(json.dumps(held) + "\n")
    (directory / "faults.py").write_text(PLUGIN)
    (directory / "fault.json").write_text(json.dumps([victim, phase, task.deadline]))
    (directory / "steps.json").write_text(json.dumps([FIRST + GAP * n for n in range(kills)]))
    words = toy_arguments(
        [str(directory / "faults.py")],
        directory / "run",
        steps,
        runtime="ray",
        rollout_num_gpus=2,
        prompt_data=directory / "prompts.jsonl",
        eval_prompt_data=directory / "held_out.jsonl",
        eval_interval=1,
        save_interval=1,
        keep=2,
        max_restarts=kills,
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=SAMPLES,
    )
    return [sys.executable, "-m", "miles_core.cli.main", "train", *words], steps


def drive(directory: Path, command: list[str]) -> int:
    """Run to the end, starting a killed driver again; how many processes it left behind."""
    left, environment = 0, {**os.environ, "RAY_TMPDIR": str(directory)}
    while True:
        with (directory / "output").open("ab") as output:
            with STARTS:  # two clusters that start at once may choose the same ports
                process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
                time.sleep(1.0)
            (directory / "driver").write_text(str(process.pid))
            code = process.wait()
        if code == 0:
            return left
        if code != -9:
            raise RuntimeError(f"the run ended with {code}:\n" + (directory / "output").read_text()[-4000:])
        left += _left_behind(directory)
        if (directory / "run/checkpoints").is_dir() and "--load" not in command:
            place = command.index("--save")
            command[place : place + 2] = ["--load", command[place + 1]]


def _left_behind(directory: Path, patience: float = 30.0) -> int:
    """Workers that are still there some time after their driver was killed."""
    found = {
        int(number)
        for file in (directory / "run/workers").glob("*.log")
        for number in re.findall(r"process (\d+) on", file.read_text())
    }
    end = time.monotonic() + patience
    while (alive := [n for n in found if _runs(n)]) and time.monotonic() < end:
        time.sleep(0.2)
    return len(alive)


def _runs(process: int) -> bool:
    """Whether a process is there, and not merely waits for a parent that asks how it ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def count(task: Task) -> dict[str, Any]:
    """Do one run: what was lost and doubled in it, and how long each recovery took."""
    with tempfile.TemporaryDirectory(prefix="f", ignore_cleanup_errors=True) as temporary:
        directory = Path(temporary)  # a short path: sockets lie below it
        command, steps = prepare(directory, task)
        left = drive(directory, command)
        lines = read_lines(directory / "trained.jsonl")
        fell = read_lines(directory / "kills.jsonl")
        metrics = read_lines(directory / "run/metrics.jsonl")
    counted = dict(lines)  # the last time of each step
    samples = Counter(tuple(pair) for pairs in counted.values() for pair in pairs)
    expected = GROUPS * SAMPLES * steps
    groups = {group for group, _ in samples}
    done = [(record["step"], record["time"]) for record in metrics]
    return {
        "kills": len(fell),
        "lost": max(0, expected - samples.total()) + GROUPS * steps - len(groups) + steps - len(counted),
        "doubled": sum(n - SAMPLES for n in samples.values() if n > SAMPLES),
        "repeated_steps": len(lines) - steps,
        "left_behind": left,
        "failed": 0,
        "waits": [min(at for step, at in done if at > when and step > fault) - when for fault, when in fell],
    }


def count_losses(task: Task, log: Path | None) -> dict[str, Any]:
    """``count``, written down; a run that fails counts as such."""
    try:
        found = count(task)
    except Exception as error:
        found = {**dict.fromkeys(SUMS, 0), "failed": 1, "waits": [], "error": str(error)}
    found = {"victim": task.victim, "phase": task.phase, **found}
    line = json.dumps(found)
    print(line[:2000], file=sys.stderr, flush=True)
    if log is not None:
        with STARTS, log.open("a") as file:
            file.write(line + "\n")
    return found


def merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One cell of the matrix."""
    waits = [seconds for run in runs for seconds in run["waits"]]
    found: dict[str, Any] = {name: sum(run[name] for run in runs) for name in SUMS}
    if waits:
        found["seconds_to_recover"] = {"median": round(statistics.median(waits), 2), "most": round(max(waits), 2)}
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each victim in each phase")
    parser.add_argument("--kills-a-run", type=int, default=20, help="at most; more make further runs")
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="no process is killed after this many; with --anytime: the total over all runs",
    )
    parser.add_argument(
        "--log", type=Path, help="a JSON line for each run that has ended; runs that it holds already count"
    )
    parser.add_argument(
        "--anytime", type=int, metavar="N", help="instead: N kills and stops at random moments (see faults_anytime.py)"
    )
    parser.add_argument("--runtime", default="remote", choices=("remote", "ray"), help="of --anytime")
    parser.add_argument("--ranks", type=int, default=2, help="trainer ranks of --anytime --runtime ray")
    parser.add_argument(
        "--rollout-workers", type=int, default=0, help="of the runs of --anytime; 0: the driver generates"
    )
    parser.add_argument(
        "--failures", type=Path, help="a directory for the files of the runs of --anytime in which something is wrong"
    )
    parser.add_argument(
        "--heartbeat", type=float, help="--worker-heartbeat of the runs of --anytime; more on a busy machine"
    )
    parser.add_argument(
        "--stall", type=float, default=STALL, help="seconds without progress after which a run of --anytime failed"
    )
    parser.add_argument("--gap", type=float, default=1.0, help="mean seconds between two faults of --anytime")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ray = ("ray",) if not chosen.anytime or chosen.runtime == "ray" else ()
    with tempfile.TemporaryDirectory() as directory:
        register(Path(directory), ray, ray)
        measure(chosen, ray)


def measure(chosen: argparse.Namespace, libraries: Sequence[str]) -> None:
    """Do what the command line ``chosen`` asks for; the result names the versions of ``libraries``."""
    versions = partial(installed, "torch", *libraries)
    if chosen.anytime:
        toy_files()
        end = time.time() + min(chosen.seconds, 1e9)
        report = partial(
            finish,
            Path(__file__).stem,
            save=chosen.save,
            versions=versions,
            variant=f"anytime-{chosen.runtime}" + ("-rollout-workers" if chosen.rollout_workers else ""),
        )
        campaign = Campaign(
            chosen.anytime,
            Shape(chosen.runtime, 1 if chosen.runtime == "remote" else chosen.ranks, chosen.rollout_workers),
            chosen.gap,
            Limits(end, chosen.stall, chosen.heartbeat or HEARTBEAT[chosen.runtime]),
            chosen.log,
            chosen.kills_a_run,
            chosen.failures,
            partial(report, quiet=True),
        )
        report(many(campaign, chosen.jobs))
        return
    end = time.time() + min(chosen.seconds, 1e9)
    cells = [(victim, phase) for victim in chosen.victims.split(",") for phase in chosen.phases.split(",")]
    earlier = read_lines(chosen.log) if chosen.log is not None else []
    open_ = {
        cell: chosen.kills - sum(r["kills"] for r in earlier if (r["victim"], r["phase"]) == cell) for cell in cells
    }
    tasks = [
        Task(*cell, min(chosen.kills_a_run, open_[cell] - first), end)
        for first in range(0, chosen.kills, chosen.kills_a_run)
        for cell in cells
        if open_[cell] > first
    ]
    toy_files()  # once, and not in several threads
    with ThreadPoolExecutor(chosen.jobs) as pool:
        runs = list(pool.map(lambda task: None if time.time() > end else count_losses(task, chosen.log), tasks))
    matrix = {
        f"{victim}, {phase}": merged(
            [r for r in (*earlier, *runs) if r is not None and (r["victim"], r["phase"]) == (victim, phase)]
        )
        for victim, phase in cells
    }
    result = {
        "groups_a_step": GROUPS,
        "samples_a_group": SAMPLES,
        "engines": 2,
        "ranks": 1,
        "jobs": chosen.jobs,
        "cells": matrix,
        **{name: sum(found[name] for found in matrix.values()) for name in SUMS},
    }
    finish(Path(__file__).stem, result, chosen.save, versions)


if __name__ == "__main__":
    main()
