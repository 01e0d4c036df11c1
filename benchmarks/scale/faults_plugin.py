"""Inflicts the faults of ``faults_anytime.py`` from inside a run: the script copies this plugin next to each run, with its settings."""

import asyncio
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import torch

from miles_core.plugin import hookimpl
from miles_embedded.engine.engine import EmbeddedEngine

HERE = Path(__file__).parent
RUNTIME, KILLS, SEED, GAP, DEADLINE = json.loads((HERE / "fault.json").read_text())
STARTED = []


def count_faults():
    path = HERE / "faults.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


DICE = random.Random(f"{SEED} {count_faults()} {os.getpid() if RUNTIME == 'ray' else ''}")


def append(name, value):
    """Append a line in one piece, whichever other processes write and whenever this one is killed."""
    with (HERE / name).open("ab", buffering=0) as file:
        file.write(json.dumps(value).encode() + b"\n")


def note(moment, how, name):
    append("faults.jsonl", [moment, how, name, time.time()])


def inflict(moment):
    if count_faults() >= KILLS or time.time() > DEADLINE:
        return
    how = "stop" if DICE.random() < 0.25 else "kill"
    if DICE.random() < 0.05:
        note(moment, "kill", "driver")
        os.kill(int((HERE / "driver").read_text()), signal.SIGKILL)
        return
    if RUNTIME == "ray" and DICE.random() < 0.04:
        victim = DICE.choice(["raylet", "gcs_server"])
        if number := find_ray(victim):
            note(moment, "kill", victim)
            os.kill(number, signal.SIGKILL)
            return
    if RUNTIME == "remote":
        from miles_testing.doubles import remote

        runtime = remote.latest()
        alive = [
            n
            for n, w in runtime.workers.items()
            if remote._ALIVE.get((w.number, n)) and not remote._ALIVE[w.number, n].stopped
        ]
        if not alive:
            return
        name = DICE.choice(alive)
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


def find_ray(victim):
    """Return the number of this process of the run's own cluster; 0 if there is none."""
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
        except OSError:
            continue
        if words.split(b"\0")[0].endswith(victim.encode()) and str(HERE).encode() in words:
            return int(process.name)
    return 0


def state(number):
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]


def perhaps(moment, chance):
    if DICE.random() < chance:
        inflict(moment)


async def strike():
    while count_faults() < KILLS and time.time() < DEADLINE:
        await asyncio.sleep(DICE.expovariate(1 / GAP))
        inflict("anytime")


@hookimpl
def on_start(run):
    if not STARTED and (RUNTIME == "remote" or "miles_ray.actor" not in sys.modules):  # in the driver only
        STARTED.append(asyncio.get_running_loop().create_task(strike()))


@hookimpl
def on_model(run, policy, model, role):
    perhaps("build", 0.05)


@hookimpl
def on_batch(run, batch):
    prompts = batch.tokens[batch.starts].tolist()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    append("trained.jsonl", [run.step, rank, sorted(zip(batch.group.tolist(), prompts, strict=True))])
    append("batches.jsonl", [run.step, rank, digest(batch.tokens), digest(batch.scalars["reward"])])
    perhaps("train", 0.1)


@hookimpl
def on_save(run, policy):
    if policy is not None:
        perhaps("save", 0.1)


def digest(tensor):
    return hashlib.blake2b(
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=8
    ).hexdigest()


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
