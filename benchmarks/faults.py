"""Workers and drivers that are killed in every phase of a run under Ray: is every prompt trained on exactly once, and how long does it take?

A plugin file kills engine, trainer rank or driver (SIGKILL) when a step reaches a phase, and writes the prompts that the rank was given
into a file of its own, which no checkpoint rolls back. Of a step that was repeated the last time counts, as it does for the weights.
A killed driver is started again by hand, as a person would (``--load``), and must leave no process behind.
Run: ``python benchmarks/faults.py --kills 20 --save`` (about an hour and a half on two cores; ``--kills 1``: five minutes).
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from measure import finish, installed, options

from miles_core.testing.toy import toy_arguments

VICTIMS = ("engine", "rank", "driver")
PHASES = ("rollout", "train", "sync", "save", "evaluation")
GROUPS, SAMPLES = 2, 4
FIRST, GAP = 2, 2  # the step of the first kill, when a checkpoint is there, and from one to the next

PLUGIN = r"""
import json, os, re, signal, time
from pathlib import Path
from miles_core import hookimpl

HERE = Path(__file__).parent
VICTIM, PHASE = json.loads((HERE / "fault.json").read_text())

def reached(run, phase):
    steps = json.loads((HERE / "steps.json").read_text())
    if phase != PHASE or run.step not in steps:
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


def prepare(directory: Path, victim: str, phase: str, kills: int) -> tuple[list[str], int]:
    """Everything a cell needs on disk; its command and how many steps it has."""
    steps = GAP * kills + FIRST + 1
    letters = [chr(ord("a") + n % 26) + str(n // 26) for n in range(GROUPS * steps)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"input": text}) + "\n" for text in letters))
    held = {"input": "z", "metadata": {"held_out": True}}
    (directory / "held_out.jsonl").write_text(json.dumps(held) + "\n")
    (directory / "faults.py").write_text(PLUGIN)
    (directory / "fault.json").write_text(json.dumps([victim, phase]))
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
    left = 0
    while True:
        with (directory / "output").open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
            (directory / "driver").write_text(str(process.pid))
            code = process.wait()
        if code == 0:
            return left
        if code != -9:
            raise SystemExit(f"the run ended with {code}:\n" + (directory / "output").read_text()[-4000:])
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
    while (alive := [n for n in found if Path(f"/proc/{n}").exists()]) and time.monotonic() < end:
        time.sleep(0.2)
    return len(alive)


def cell(victim: str, phase: str, kills: int) -> dict[str, Any]:
    """Kill one victim in one phase, ``kills`` times."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        command, steps = prepare(directory, victim, phase, kills)
        left = drive(directory, command)
        lines = [json.loads(line) for line in (directory / "trained.jsonl").read_text().splitlines()]
        fell = [json.loads(line) for line in (directory / "kills.jsonl").read_text().splitlines()]
        metrics = [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
    counted = dict(lines)  # the last time of each step
    samples = Counter(tuple(pair) for pairs in counted.values() for pair in pairs)
    expected = GROUPS * SAMPLES * steps
    groups = {group for group, _ in samples}
    done = [(record["step"], record["time"]) for record in metrics]
    waits = [min(at for step, at in done if at > when and step > fault) - when for fault, when in fell]
    return {
        "kills": len(fell),
        "lost": max(0, expected - samples.total()) + GROUPS * steps - len(groups) + steps - len(counted),
        "doubled": sum(n - SAMPLES for n in samples.values() if n > SAMPLES),
        "repeated_steps": len(lines) - steps,
        "left_behind": left,
        "seconds_to_recover": {"median": round(statistics.median(waits), 2), "most": round(max(waits), 2)},
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each victim in each phase")
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--phases", default=",".join(PHASES))
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cells: dict[str, Any] = {}
    for victim in chosen.victims.split(","):
        for phase in chosen.phases.split(","):
            cells[f"{victim}, {phase}"] = found = cell(victim, phase, chosen.kills)
            print(f"{victim:8} {phase:12} {found}", file=sys.stderr, flush=True)
    result = {
        "groups_a_step": GROUPS,
        "samples_a_group": SAMPLES,
        "engines": 2,
        "ranks": 1,
        "cells": cells,
        **{name: sum(found[name] for found in cells.values()) for name in ("kills", "lost", "doubled", "left_behind")},
    }
    finish(Path(__file__).stem, result, chosen.save, lambda: installed("torch", "ray"))


if __name__ == "__main__":
    main()
