"""Kills and stops at random moments, for ``faults.py --anytime N``.

A plugin file kills (SIGKILL) or stops (SIGSTOP) a random worker after a random time, and sometimes in the middle of a hook: at a tensor of a
push, a batch, a save, the build of a model. Some faults kill the driver instead, which is then started again with ``--load``. With the
runtime ``apart`` the workers are objects of the run's process, which makes many faults cheap; with ``ray`` they are processes.

Counted over all runs: samples that were lost or trained twice (of a step that was repeated the last time counts), versions that an engine
installed with tensors of two pushes, workers that the log calls lost although nothing was done to them, runs that failed or made no progress
for ``STALL`` seconds, complaints of Python, PyTorch or asyncio on standard error, and seconds from a fault to the next completed step. The
last checkpoint is compared byte for byte with that of a run without faults.
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

from miles_testing.doubles import apart
from miles_testing.toy import toy_arguments

GROUPS, SAMPLES = 2, 4
#: Seconds before the end in which no fault happens, so that runs reach their last step.
SPARE = 60.0
#: Seconds without a completed step or a fault after which a run counts as failed.
STALL = 150.0
#: What a process writes that did not end properly.
COMPLAINT = re.compile(
    r"terminate called|Exception ignored|was destroyed but|never retrieved|Fatal Python error|was never awaited"
)
#: The log's message about a replaced worker; no match spans two of them.
REPLACED = re.compile(r"worker (\S+) was lost: (?:(?!worker \S+ was lost: ).)*?; it is replaced", re.DOTALL)
#: Seconds after which a stopped worker counts as lost.
HEARTBEAT = {"apart": 0.5, "ray": 5.0}

PLUGIN = r"""
import asyncio, hashlib, json, os, random, re, signal, threading, time
from pathlib import Path
from miles_core.plugin import hookimpl

HERE = Path(__file__).parent
RUNTIME, KILLS, SEED, GAP, DEADLINE = json.loads((HERE / "fault.json").read_text())
STARTED = []

def fell():
    path = HERE / "faults.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0

DICE = random.Random(f"{SEED} {fell()} {os.getpid() if RUNTIME == 'ray' else ''}")

def append(name, value):  # in one piece, whoever else writes and whenever this process is killed
    with (HERE / name).open("ab", buffering=0) as file:
        file.write(json.dumps(value).encode() + b"\n")

def note(moment, how, name):
    append("faults.jsonl", [moment, how, name, time.time()])

def inflict(moment, name=None):
    if fell() >= KILLS or time.time() > DEADLINE:
        return
    how = "stop" if DICE.random() < 0.25 else "kill"
    if DICE.random() < 0.05:
        note(moment, "kill", "driver")
        os.kill(int((HERE / "driver").read_text()), signal.SIGKILL)
        return
    if RUNTIME == "apart":
        from miles_testing.doubles import apart
        runtime = apart.latest()
        alive = [n for n, w in runtime.workers.items() if apart._ALIVE.get((w.number, n)) and not apart._ALIVE[w.number, n].stopped]
        if not alive:
            return
        name = name if name in alive else DICE.choice(alive)
        note(moment, how, name)
        (runtime.hang if how == "stop" else runtime.kill)(name)
        return
    found = {}
    for log in (HERE / "run/workers").glob("*.log"):
        numbers = re.findall(r"process (\d+) on", log.read_text())
        if numbers and Path(f"/proc/{numbers[-1]}").exists() and state(numbers[-1]) not in "TZX":
            found[log.stem] = int(numbers[-1])
    if found:
        name = DICE.choice(sorted(found))
        note(moment, how, name)
        os.kill(found[name], signal.SIGSTOP if how == "stop" else signal.SIGKILL)

def state(number):
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]

def perhaps(moment, chance):
    if DICE.random() < chance:
        inflict(moment)

async def strike():
    while fell() < KILLS and time.time() < DEADLINE:
        await asyncio.sleep(DICE.expovariate(1 / GAP))
        inflict("anytime")

@hookimpl
def on_start(run):
    if not STARTED and "miles_ray.actor" not in __import__("sys").modules or RUNTIME == "apart" and not STARTED:
        STARTED.append(asyncio.get_running_loop().create_task(strike()))

@hookimpl
def on_model(run, policy, model, role):
    perhaps("build", 0.05)

@hookimpl
def on_batch(run, batch):
    prompts = batch.tokens[batch.starts].tolist()
    append("trained.jsonl", [run.step, sorted(zip(batch.group.tolist(), prompts))])
    append("batches.jsonl", [run.step, digest(batch.tokens), digest(batch.scalars["reward"])])
    perhaps("train", 0.1)

@hookimpl
def on_save(run, policy):
    if policy is not None:
        perhaps("save", 0.1)

def digest(tensor):
    import torch
    return hashlib.blake2b(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()

@hookimpl
def wrap_weights(run):
    def wrap(inner):
        def weights():
            whole = {}
            for unit in inner():
                whole |= {name: digest(tensor) for name, tensor in unit.tensors.items()}
                perhaps("push", 0.004)
                yield unit
            append("sent.jsonl", whole)
        return weights
    return wrap

from miles_embedded.engine.engine import EmbeddedEngine
if not hasattr(EmbeddedEngine, "_noted"):
    EmbeddedEngine._noted = True
    plain = EmbeddedEngine.update_weights
    async def update_weights(self, units, version):
        whole = {}
        def seen():
            for unit in units:
                whole.update({name: digest(tensor) for name, tensor in unit.parts.items()})
                yield unit
        await plain(self, seen(), version)
        append("installed.jsonl", [version, whole])
    EmbeddedEngine.update_weights = update_weights
"""


#: Held while a toy model is made, which draws from torch's global generator.
MAKING = threading.Lock()


def arguments(*given: Any, **options: Any) -> list[str]:
    """``toy_arguments``, in one thread at a time."""
    with MAKING:
        return toy_arguments(*given, **options)


def steps_of(kills: int) -> int:
    """Steps of a run with so many faults; more than that many faults happen only if recoveries take long."""
    return max(4, kills)


def once(
    runtime: str, kills: int, seed: int, gap: float, ranks: int, directory: Path, end: float
) -> dict[str, Any] | None:
    """One run with ``kills`` faults; what was found in it, or None if it had not ended at ``end``."""
    steps = steps_of(kills)
    letters = [chr(ord("a") + n % 26) + str(n // 26) for n in range(GROUPS * steps)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"input": text}) + "\n" for text in letters))
    (directory / "faults.py").write_text(PLUGIN)
    (directory / "fault.json").write_text(json.dumps([runtime, kills, seed, gap, end - SPARE]))
    plugins = [str(directory / "faults.py"), *([apart.__file__] if runtime == "apart" else [])]
    sizes = {"apart_engines": 2} if runtime == "apart" else {"rollout_num_gpus": 2, "actor_num_gpus_per_node": ranks}
    words = arguments(
        plugins,
        directory / "run",
        steps,
        runtime=runtime,
        prompt_data=directory / "prompts.jsonl",
        save_interval=1,
        keep=2,
        max_restarts=20 * kills + 20,
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=SAMPLES,
        sync_bucket_size=1 << 14,
        worker_heartbeat=HEARTBEAT[runtime],
        **sizes,
    )
    command = [sys.executable, "-m", "miles_core.cli.main", "train", *words]
    while (code := _drive(command, directory, end)) == -signal.SIGKILL:
        if (directory / "run/checkpoints").is_dir() and "--save" in command:
            command[command.index("--save")] = "--load"
    return None if code is None else judge(directory, steps, code)


def _drive(command: list[str], directory: Path, end: float) -> int | None:
    """Run a driver until it ends; its exit status, or None if it had not ended at ``end``. A run without progress is stopped with SIGABRT,
    which writes the stack of each thread."""
    environment = {**os.environ, "RAY_TMPDIR": str(directory), "PYTHONFAULTHANDLER": "1"}
    with (directory / "output").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    (directory / "driver").write_text(str(process.pid))
    started = time.time()
    while time.time() < end:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
        files = [directory / "faults.jsonl", directory / "run/metrics.jsonl"]
        if time.time() - max([started, *(file.stat().st_mtime for file in files if file.exists())]) > STALL:
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


def judge(directory: Path, steps: int, code: int) -> dict[str, Any]:
    """What the files of a run say."""
    from faults import read_lines

    faults = read_lines(directory / "faults.jsonl")
    trained = dict(read_lines(directory / "trained.jsonl"))
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
        "stopped": sum(how == "stop" for _, how, *_ in faults),
        "lost": max(0, GROUPS * SAMPLES * steps - samples.total()) + steps - len(trained),
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
    return any(found[name] for name in ("lost", "doubled", "mixed", "innocent", "failed", "complaints"))


def _merged(parts: list[dict[str, str]]) -> list[dict[str, str]]:
    """What several ranks send is one version: all unions of two parts without a name in common."""
    return [a | b for n, a in enumerate(parts) for b in parts[n + 1 :] if not a.keys() & b.keys()]


def weights_of(checkpoints: Path, step: int) -> str:
    """Digest of all tensors in the checkpoint of a step; empty without one."""
    files = sorted((checkpoints / f"step_{step:08d}").rglob("*.safetensors"))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files)).hexdigest()[:16] if files else ""


@dataclass
class Campaign:
    """Runs with faults, several at a time, until enough faults happened or the time is over.

    Attributes:
        kills: faults in all, those of earlier sittings included.
        gap: mean seconds between two faults of a run.
        end: ``time.time()`` at which a run that has not ended is stopped and does not count; no fault happens in the last ``SPARE`` seconds.
        log: a file with one JSON line per run; the runs that it holds already count.
        failures: a directory that receives the files of runs in which something is wrong.
        report: called with the counts after every run.
    """

    kills: int
    runtime: str
    ranks: int
    gap: float
    end: float
    log: Path | None
    a_run: int
    failures: Path | None = None
    report: Callable[[dict[str, Any]], None] = lambda counts: None

    def __post_init__(self) -> None:
        from faults import read_lines

        self.runs = [run for run in (read_lines(self.log) if self.log else []) if run["runtime"] == self.runtime]
        self.undisturbed: dict[int, tuple[str, dict[int, list[str]]]] = {}
        self.cut = 0
        self._lock, self._referring, self._flying = threading.Lock(), threading.Lock(), 0

    def work(self) -> None:
        """Do one run after the other."""
        while count := self._claim():
            seed = random.randrange(1 << 30)
            with tempfile.TemporaryDirectory(prefix="f", ignore_cleanup_errors=True) as name:
                found = once(self.runtime, count, seed, self.gap, self.ranks, Path(name), self.end)
                if self.failures is not None and (found is None or is_wrong(found)):
                    shutil.copytree(name, self.failures / str(seed), ignore=shutil.ignore_patterns("session_*", "ray*"))
            if found and not found["failed"]:
                weights, batches = self._reference(steps_of(count))
                found["equal"] = found["weights"] == weights
                different = [step for step, *batch in found.pop("batches") if batch != batches[step]]
                found["different_batches"] = different  # other tokens were sampled in these steps
            with self._lock:
                self._flying -= count
                self.cut += found is None
                if found:
                    found.pop("batches", None)
                    self._record({"runtime": self.runtime, "seed": seed, **found})

    def _claim(self) -> int:
        """Faults of the next run; 0 if there is no further run."""
        with self._lock:
            count: int = min(self.a_run, self.kills - sum(run["kills"] for run in self.runs) - self._flying)
            if count <= 0 or time.time() > self.end - 2 * SPARE:
                return 0
            self._flying += count
            return count

    def _reference(self, steps: int) -> tuple[str, dict[int, list[str]]]:
        """The weights after so many steps without a fault, and step -> digests of its batch."""
        with self._referring:
            if steps not in self.undisturbed:
                with tempfile.TemporaryDirectory(prefix="f", ignore_cleanup_errors=True) as name:
                    self.undisturbed[steps] = reference(self.runtime, steps, self.ranks, Path(name))
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
        names = ("kills", "drivers", "stopped", "lost", "doubled", "mixed", "innocent", "failed")
        moments = sum((Counter(run["moments"]) for run in runs), Counter[str]())
        return {
            "runtime": self.runtime,
            "ranks": self.ranks,
            "engines": 2,
            "runs": len(runs),
            **{name: sum(run[name] for run in runs) for name in names},
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


def reference(runtime: str, steps: int, ranks: int, directory: Path) -> tuple[str, dict[int, list[str]]]:
    """The weights of the last checkpoint of a run of as many steps without a fault, and step -> digests of its batch."""
    from faults import read_lines

    letters = [chr(ord("a") + n % 26) + str(n // 26) for n in range(GROUPS * steps)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"input": text}) + "\n" for text in letters))
    sizes = {"apart_engines": 2} if runtime == "apart" else {"rollout_num_gpus": 2, "actor_num_gpus_per_node": ranks}
    (directory / "faults.py").write_text(PLUGIN)
    (directory / "fault.json").write_text(json.dumps([runtime, 0, 0, 1.0, 0.0]))
    plugins = [str(directory / "faults.py"), *([apart.__file__] if runtime == "apart" else [])]
    words = arguments(
        plugins,
        directory / "run",
        steps,
        runtime=runtime,
        prompt_data=directory / "prompts.jsonl",
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=SAMPLES,
        **sizes,
    )
    command = [sys.executable, "-m", "miles_core.cli.main", "train", *words]
    subprocess.run(command, capture_output=True, env={**os.environ, "RAY_TMPDIR": str(directory)}, check=True)
    batches = {step: batch for step, *batch in read_lines(directory / "batches.jsonl")}
    return weights_of(directory / "run/checkpoints", steps), batches
