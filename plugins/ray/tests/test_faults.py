"""Processes that are killed or stopped where it hurts: in a push, in the middle of a rollout, and Ray's own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from miles_testing.toy import toy_arguments

#: Does one thing at one moment (``fault.json``: moment, step, kind, victim), once.
FAULTS = r"""
import json, os, re, signal, time
from pathlib import Path
from miles_core.plugin import hookimpl

HERE = Path(__file__).parent

def reach(run, moment, step):
    what = json.loads((HERE / "fault.json").read_text())
    flag = HERE / "struck"
    if [moment, step] != what[:2] or flag.exists():
        return
    flag.touch()
    (HERE / "listeners.json").write_text(json.dumps(listeners()))
    flag.touch()  # the search took a while, and its time is that of the fault
    kind, victim = what[2:]
    if victim == "driver":
        numbers = [int((HERE / "driver").read_text())]
    elif victim == "driver while the rank is stopped":
        os.kill(int((HERE / "driver").read_text()), signal.SIGTERM)
        numbers = [os.getpid()]
    elif victim in ("gcs_server", "raylet"):
        numbers = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and is_ours(p, victim)]
    else:
        numbers = [int(re.findall(r"process (\d+) on", (run.directory / f"workers/{victim}.log").read_text())[-1])]
    for number in numbers:
        os.kill(number, getattr(signal, kind))
        while kind == "SIGKILL" and victim == "raylet" and alive(number):
            time.sleep(0.01)

def listeners():  # [program, hexadecimal address] of all TCP sockets on which processes of this cluster listen
    owners = {}
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (HERE / "temporary").read_bytes() in (process / "environ").read_bytes():
                program = (process / "cmdline").read_bytes().split(b"\0")[0].decode()
                owners |= {os.readlink(entry): program for entry in (process / "fd").iterdir()}
        except OSError:
            pass
    rows = [r.split() for kind in ("tcp", "tcp6") for r in Path("/proc/net", kind).read_text().splitlines()[1:]]
    sockets = [(f"socket:[{row[9]}]", row[1].split(":")[0]) for row in rows if row[3] == "0A"]
    return [(owners[name], address) for name, address in sockets if name in owners]

def alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

def is_ours(process, name):
    try:
        words = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return words.split(b"\0")[0].endswith(name.encode()) and (HERE / "temporary").read_bytes() in words

@hookimpl
def on_batch(run, batch):
    reach(run, "train", run.step)

@hookimpl
def wrap_weights(run):
    def wrap(inner):
        def weights():
            for number, unit in enumerate(inner()):
                if number == 5:
                    reach(run, "push", run.step)
                yield unit
        return weights
    return wrap

@hookimpl
def on_sample(run, sample):
    reach(run, "rollout", run.step)
"""


@pytest.fixture
def struck(tmp_path_factory):
    """``struck(moment, step, signal, victim)``: exit status, seconds from the fault to the end, and the directory of a run."""
    pytest.importorskip("ray")
    directory = tmp_path_factory.mktemp("f")
    temporary = tempfile.mkdtemp(prefix="ray-")  # paths of sockets have at most 107 bytes

    def call(moment, step, kind, victim, ranks=1, **options):
        (directory / "faults.py").write_text(FAULTS)
        (directory / "fault.json").write_text(json.dumps([moment, step, kind, victim]))
        given = {"steps": 3, "save_interval": 1, "worker_heartbeat": 5, "sync_bucket_size": 1 << 14, **options}
        words = toy_arguments(
            [str(directory / "faults.py")],
            directory / "run",
            runtime="ray",
            actor_num_gpus_per_node=ranks,
            rollout_num_gpus=2,
            **given,
        )
        environment = {**os.environ, "RAY_TMPDIR": temporary, "OMP_NUM_THREADS": "1"}
        (directory / "temporary").write_text(temporary)
        with (directory / "output").open("wb") as output:
            command = [sys.executable, "-m", "miles_core.cli.main", "train", *words]
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            (directory / "driver").write_text(str(process.pid))
            try:
                code = process.wait(timeout=500)
            finally:
                process.kill()
        flag = directory / "struck"
        return code, time.time() - flag.stat().st_mtime if flag.exists() else None, directory

    yield call
    shutil.rmtree(temporary, ignore_errors=True)


def log_of(directory):
    return (directory / "run/run.log").read_text()


@pytest.mark.thorough
def test_a_rank_that_is_killed_in_its_push_costs_one_replacement(struck):
    code, _, directory = struck("push", 2, "SIGKILL", "trainer-0", ranks=2)
    assert code == 0, (directory / "output").read_text()[-3000:]
    assert re.findall(r"worker (\S+) was lost", log_of(directory)) == ["trainer-0"]
    assert json.loads((directory / "run/ending.json").read_text())["step"] == 3
    listeners = json.loads((directory / "listeners.json").read_text())
    assert {"gcs_server", "raylet"} <= {program.rpartition("/")[2] for program, _ in listeners}
    assert {address for _, address in listeners} <= {"0100007F", "0" * 16 + "FFFF00000100007F"}, listeners


@pytest.mark.thorough
def test_an_engine_that_is_stopped_in_a_push_is_named_itself(struck):
    code, _, directory = struck("push", 2, "SIGSTOP", "engine-1")
    assert code == 0, (directory / "output").read_text()[-3000:]
    assert re.findall(r"worker (\S+) was lost: it gave no sign of life for 5 s", log_of(directory)) == ["engine-1"]
    assert len(re.findall(r"worker \S+ was lost", log_of(directory))) == 1


@pytest.mark.thorough
def test_the_control_store_dies_and_the_last_step_is_saved(struck):
    code, _, directory = struck("rollout", 2, "SIGKILL", "gcs_server", save_interval=None, steps=200)
    assert code == 2, (directory / "output").read_text()[-3000:]
    ended = json.loads((directory / "run/ending.json").read_text())
    assert "gcs_server) of Ray" in ended["why"] and ended["step"] >= 2
    assert ended["checkpoint"].endswith(f"step_{ended['step']:08d}")


@pytest.mark.thorough
def test_the_raylet_dies_and_the_run_ends_with_a_sentence(struck):
    code, _, directory = struck("rollout", 2, "SIGKILL", "raylet")
    assert code == 2, (directory / "output").read_text()[-3000:]
    ended = json.loads((directory / "run/ending.json").read_text())
    assert "(raylet)" in ended["why"] and ended["checkpoint"].endswith("step_00000002")


@pytest.mark.thorough
def test_a_run_that_is_to_end_while_a_rank_hangs_ends_in_time(struck):
    """The weights of the last step are in the rank that hangs, so the checkpoint before it is the last one. --stop-within is 20; the
    rest is for a busy machine."""
    code, seconds, directory = struck("train", 2, "SIGSTOP", "driver while the rank is stopped", worker_heartbeat=60)
    assert code == 128 + signal.SIGTERM and seconds < 30, (directory / "output").read_text()[-3000:]
    ended = json.loads((directory / "run/ending.json").read_text())
    assert ended["why"] == "stopped by SIGTERM" and ended["checkpoint"].endswith("step_00000002")
