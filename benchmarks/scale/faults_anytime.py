"""Kills and stops at random moments, for ``faults.py --anytime N``.

A plugin file kills (SIGKILL) or stops (SIGSTOP) a random worker after a random time, and sometimes in the middle of a hook: at a tensor of a
push, a batch, a save, the build of a model. Some faults kill the driver instead, which is then started again with ``--load``. With the
runtime ``remote`` the workers are objects of the run's process, which makes many faults cheap; with ``ray`` they are processes, and Ray's own
processes (raylet and control store) are killed, too. A run cannot go on without them: it has to end with a one-line error and its last
completed step saved, and is then started again.

Counted over all runs: samples that were lost or trained twice (of a step that was repeated the last time counts), versions that an engine
installed with tensors of two pushes, workers that the log calls lost although nothing was done to them, runs that failed or made no progress
for ``--stall`` seconds, complaints of Python, PyTorch or asyncio on standard error, runs that lost a completed step with Ray's processes, and
seconds from a fault to the next completed step. The last checkpoint is compared byte for byte with that of a run without faults.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_testing.doubles import remote
from miles_testing.toy import toy_arguments

GROUPS, SAMPLES = 2, 4
#: Seconds before the end in which no fault happens, so that runs reach their last step.
SPARE = 60.0
#: Seconds without a completed step or a fault after which a run counts as failed, unless ``--stall`` is given.
STALL = 150.0
#: Ray's own processes, by which a run ends.
RAY = ("raylet", "gcs_server")
#: What a process writes that did not end properly.
COMPLAINT = re.compile(
    r"terminate called|Exception ignored|was destroyed but|never retrieved|Fatal Python error|was never awaited"
)
#: The log's message about a replaced worker; no match spans two of them.
REPLACED = re.compile(r"worker (\S+) was lost: (?:(?!worker \S+ was lost: ).)*?; it is replaced", re.DOTALL)
#: The plugin of the runs, which inflicts the faults.
PLUGIN = Path(__file__).with_name("faults_plugin.py").read_text()
#: Seconds after which a stopped worker counts as lost, unless ``--heartbeat`` is given.
HEARTBEAT = {"remote": 0.5, "ray": 5.0}


#: Held while a toy model is made, which draws from torch's global generator.
MAKING = threading.Lock()


def read_lines(path: Path) -> list[Any]:
    """What is in a file with a JSON value a line; nothing where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def arguments(*given: Any, **options: Any) -> list[str]:
    """``toy_arguments``, in one thread at a time."""
    with MAKING:
        return toy_arguments(*given, **options)


def steps_of(kills: int) -> int:
    """Steps of a run with so many faults; more than that many faults happen only if recoveries take long."""
    return max(4, kills)


@dataclass(frozen=True)
class Limits:
    """Seconds: ``end`` (``time.time()``) is when a run is cut off; without progress for ``stall`` it failed; workers that are silent for
    ``heartbeat`` are lost."""

    end: float
    stall: float
    heartbeat: float


@dataclass(frozen=True)
class Shape:
    """The processes of a run: its runtime, trainer ranks, and rollout workers (0: the driver generates)."""

    runtime: str
    ranks: int
    rollouts: int = 0

    def options(self) -> dict[str, Any]:
        """The options of a toy run."""
        remote_sizes, ray_sizes = {"remote_engines": 2}, {"rollout_num_gpus": 2, "actor_num_gpus_per_node": self.ranks}
        sizes = remote_sizes if self.runtime == "remote" else ray_sizes
        return {"runtime": self.runtime, "rollout_workers": self.rollouts or None, **sizes}


def once(shape: Shape, kills: int, seed: int, gap: float, directory: Path, limits: Limits) -> dict[str, Any] | None:
    """One run with ``kills`` faults; what was found in it, or None if it had not ended in time."""
    steps = steps_of(kills)
    letters = [chr(ord("a") + n % 26) + str(n // 26) for n in range(GROUPS * steps)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"input": text}) + "\n" for text in letters))
    (directory / "faults.py").write_text(PLUGIN)
    (directory / "fault.json").write_text(json.dumps([shape.runtime, kills, seed, gap, limits.end - SPARE]))
    plugins = [str(directory / "faults.py"), *([remote.__file__] if shape.runtime == "remote" else [])]
    words = arguments(
        plugins,
        directory / "run",
        steps,
        prompt_data=directory / "prompts.jsonl",
        save_interval=1,
        keep=2,
        max_restarts=20 * kills + 20,
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=SAMPLES,
        sync_bucket_size=1 << 14,
        worker_heartbeat=limits.heartbeat,
        **shape.options(),
    )
    command = [sys.executable, "-m", "miles_core.cli.main", "train", *words]
    unsaved = 0
    while (code := _drive(command, directory, limits)) is not None:
        if code != -signal.SIGKILL:
            if not (code == 2 and (victim := _ended_with_ray(directory))):
                break
            if (
                victim == "gcs_server"
            ):  # the ranks survive it for a while; with the raylet of the only machine the weights are gone
                unsaved += _count_unsaved(directory)
        if not any(
            (directory / "run/checkpoints").glob("step_*")
        ):  # killed before its first checkpoint: it starts again
            shutil.rmtree(directory / "run", ignore_errors=True)
        elif "--save" in command:
            command[command.index("--save")] = "--load"
    return None if code is None else {**judge(directory, steps, shape.ranks, code), "unsaved": unsaved}


def _ended_with_ray(directory: Path) -> str:
    """The process of Ray by whose death the run ended, as its error says in one line; empty if it ended otherwise."""
    ending = directory / "run/ending.json"
    why = json.loads(ending.read_text())["why"] if ending.is_file() else ""
    return next((name for name in RAY if f"({name})" in why), "")


def _count_unsaved(directory: Path) -> int:
    """Completed steps after the last checkpoint."""
    ending = json.loads((directory / "run/ending.json").read_text())
    return int(ending["step"]) - int((ending["checkpoint"] or "_0").rpartition("_")[2])


def _drive(command: list[str], directory: Path, limits: Limits) -> int | None:
    """Run a driver until it ends; its exit status, or None if it had not ended at ``end``. A run without progress is stopped with SIGABRT,
    which writes the stack of each thread."""
    environment = {**os.environ, "RAY_TMPDIR": str(directory), "PYTHONFAULTHANDLER": "1"}
    with (directory / "output").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    (directory / "driver").write_text(str(process.pid))
    started = time.time()
    while time.time() < limits.end:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
        files = [directory / "faults.jsonl", directory / "run/metrics.jsonl"]
        if time.time() - max([started, *(file.stat().st_mtime for file in files if file.exists())]) > limits.stall:
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(10.0)
                with suppress(ProcessLookupError):  # what is left of its cluster
                    os.killpg(process.pid, signal.SIGKILL)
                return code
            break
    process.terminate()  # a run with Ray then ends its cluster
    try:
        process.wait(25)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def judge(directory: Path, steps: int, ranks: int, code: int) -> dict[str, Any]:
    """What the files of a run say."""
    faults = read_lines(directory / "faults.jsonl")
    trained = {(step, rank): pairs for step, rank, pairs in read_lines(directory / "trained.jsonl")}
    samples = Counter(tuple(pair) for pairs in trained.values() for pair in pairs)
    sent = {json.dumps(whole, sort_keys=True) for whole in read_lines(directory / "sent.jsonl")}
    sent |= {json.dumps(merge, sort_keys=True) for merge in _merged(read_lines(directory / "sent.jsonl"))}
    mixed = [
        v for v, whole in read_lines(directory / "installed.jsonl") if json.dumps(whole, sort_keys=True) not in sent
    ]
    output = (directory / "output").read_text(errors="replace")
    log = (directory / "run/run.log").read_text() if (directory / "run/run.log").is_file() else ""
    blamed = Counter(REPLACED.findall(log))
    struck = Counter(name for _, _, name, _ in faults)
    done = [record["time"] for record in read_lines(directory / "run/metrics.jsonl")]
    waits = [min((at for at in done if at > when), default=when) - when for *_, when in faults]
    found = {
        "kills": len(faults),
        "moments": dict(Counter(moment for moment, *_ in faults)),
        "drivers": struck["driver"],
        "ray": sum(struck[name] for name in RAY),
        "stopped": sum(how == "stop" for _, how, *_ in faults),
        "lost": max(0, GROUPS * SAMPLES * steps - samples.total()) + steps * ranks - len(trained),
        "doubled": sum(n - SAMPLES for n in samples.values() if n > SAMPLES),
        "mixed": len(mixed),
        "innocent": sum(max(0, count - struck[name]) for name, count in blamed.items()),
        "complaints": COMPLAINT.findall(output),
        "failed": int(code != 0),
        "waits": waits,
        "weights": weights_of(directory / "run/checkpoints", steps),
        "batches": read_lines(directory / "batches.jsonl"),
    }
    if code:
        found["error"] = f"exit status {code}: {output[-1500:]}"
    return found


def is_wrong(found: dict[str, Any]) -> bool:
    """Whether a run found anything that must not happen."""
    return any(found[name] for name in ("lost", "doubled", "mixed", "innocent", "failed", "complaints", "unsaved"))


def _merged(parts: list[dict[str, str]]) -> list[dict[str, str]]:
    """What several ranks send is one version: all unions of two parts without a name in common."""
    return [a | b for n, a in enumerate(parts) for b in parts[n + 1 :] if not a.keys() & b.keys()]


def weights_of(checkpoints: Path, step: int) -> str:
    """Digest of the ranks' tensors in the checkpoint of a step; empty without one. It excludes the driver's random generators, which
    libraries use, too."""
    files = sorted(f for f in (checkpoints / f"step_{step:08d}").rglob("*.safetensors") if f.name != "rng.safetensors")
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files)).hexdigest()[:16] if files else ""


@dataclass
class Campaign:
    """Runs with faults, several at a time, until enough faults happened or the time is over.

    Attributes:
        kills: faults in all, those of earlier sittings included.
        gap: mean seconds between two faults of a run.
        limits: a run that has not ended at ``limits.end`` is stopped and does not count; no fault happens in the last ``SPARE`` seconds.
        log: a file with one JSON line per run; the runs that it holds already count.
        failures: a directory that receives the files of runs in which something is wrong.
        report: called with the counts after every run.
    """

    kills: int
    shape: Shape
    gap: float
    limits: Limits
    log: Path | None
    a_run: int
    failures: Path | None = None
    report: Callable[[dict[str, Any]], None] = lambda counts: None

    def __post_init__(self) -> None:
        self.runs = [run for run in (read_lines(self.log) if self.log else []) if run["runtime"] == self.shape.runtime]
        self.undisturbed: dict[int, tuple[str, dict[tuple[int, int], list[str]]]] = {}
        self.cut = 0
        self._lock, self._referring, self._flying = threading.Lock(), threading.Lock(), 0

    def work(self) -> None:
        """Do one run after the other."""
        while count := self._claim():
            seed = random.randrange(1 << 30)
            with tempfile.TemporaryDirectory(prefix="f", ignore_cleanup_errors=True) as name:
                found = once(self.shape, count, seed, self.gap, Path(name), self.limits)
                if self.failures is not None and (found is None or is_wrong(found)):
                    shutil.copytree(name, self.failures / str(seed), ignore=shutil.ignore_patterns("session_*", "ray*"))
            if found and not found["failed"]:
                weights, batches = self._reference(steps_of(count))
                found["equal"] = found["weights"] == weights
                different = [step for step, rank, *batch in found.pop("batches") if batch != batches[step, rank]]
                found["different_batches"] = different  # other tokens were sampled in these steps
            with self._lock:
                self._flying -= count
                self.cut += found is None
                if found:
                    found.pop("batches", None)
                    self._record({"runtime": self.shape.runtime, "seed": seed, **found})

    def _claim(self) -> int:
        """Faults of the next run; 0 if there is no further run."""
        with self._lock:
            count: int = min(self.a_run, self.kills - sum(run["kills"] for run in self.runs) - self._flying)
            if count <= 0 or time.time() > self.limits.end - 2 * SPARE:
                return 0
            self._flying += count
            return count

    def _reference(self, steps: int) -> tuple[str, dict[tuple[int, int], list[str]]]:
        """The weights after so many steps without a fault, and step -> digests of its batch."""
        with self._referring:
            if steps not in self.undisturbed:
                with tempfile.TemporaryDirectory(prefix="f", ignore_cleanup_errors=True) as name:
                    self.undisturbed[steps] = reference(self.shape, steps, Path(name))
            return self.undisturbed[steps]

    def _record(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        print(
            f"{sum(r['kills'] for r in self.runs)} of {self.kills}  {json.dumps(run)[:600]}",
            file=sys.stderr,
            flush=True,
        )
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(json.dumps(run) + "\n")
        self.report(self.summary())

    def summary(self) -> dict[str, Any]:
        """The counts of all runs."""
        runs = self.runs
        waits = [seconds for run in runs for seconds in run["waits"]]
        names = ("kills", "drivers", "ray", "stopped", "lost", "doubled", "mixed", "innocent", "failed", "unsaved")
        moments = sum((Counter(run["moments"]) for run in runs), Counter[str]())
        return {
            "runtime": self.shape.runtime,
            "ranks": self.shape.ranks,
            "engines": 2,
            "rollout_workers": self.shape.rollouts,
            "runs": len(runs),
            **{name: sum(run.get(name, 0) for run in runs) for name in names},
            "heartbeat": self.limits.heartbeat,
            "complaints": dict(Counter(text for run in runs for text in run["complaints"])),
            "not_ended": self.cut,
            "moments": dict(moments),
            "runs_compared": sum("equal" in run for run in runs),
            "checkpoints_equal": sum(run.get("equal", False) for run in runs),
            "seconds_to_next_step": {"median": round(statistics.median(waits), 2), "most": round(max(waits), 2)}
            if waits
            else {},
            "errors": [run["error"][-300:] for run in runs if "error" in run],
            "load": os.getloadavg()[0],
        }


def many(campaign: Campaign, jobs: int) -> dict[str, Any]:
    """Do a campaign with ``jobs`` runs at a time; the counts of all runs."""
    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(campaign.work) for _ in range(jobs)]:
            future.result()
    return campaign.summary()


def reference(shape: Shape, steps: int, directory: Path) -> tuple[str, dict[tuple[int, int], list[str]]]:
    """The weights of the last checkpoint of a run of as many steps without a fault and without rollout workers, and step -> digests of
    its batch."""
    letters = [chr(ord("a") + n % 26) + str(n // 26) for n in range(GROUPS * steps)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"input": text}) + "\n" for text in letters))
    (directory / "faults.py").write_text(PLUGIN)
    (directory / "fault.json").write_text(json.dumps([shape.runtime, 0, 0, 1.0, 0.0]))
    plugins = [str(directory / "faults.py"), *([remote.__file__] if shape.runtime == "remote" else [])]
    words = arguments(
        plugins,
        directory / "run",
        steps,
        prompt_data=directory / "prompts.jsonl",
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=SAMPLES,
        **Shape(shape.runtime, shape.ranks).options(),
    )
    command = [sys.executable, "-m", "miles_core.cli.main", "train", *words]
    subprocess.run(command, capture_output=True, env={**os.environ, "RAY_TMPDIR": str(directory)}, check=True)
    batches = {(step, rank): batch for step, rank, *batch in read_lines(directory / "batches.jsonl")}
    return weights_of(directory / "run/checkpoints", steps), batches
