"""Interpreters that imported SGLang's parts run its processes, unless the environment has changed."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from miles_sglang import build, standby
from miles_sglang.standby import Pool, changes

TARGET = """
import os
BEFORE = {name: os.environ.get(name, "") for name in ("SGLANG_RUN_ID", "OTHER")}

def run_scheduler_process(writer, number):
    now = {name: os.environ.get(name, "") for name in BEFORE}
    writer.send((os.getpid(), os.getppid(), BEFORE, now))
    raise SystemExit(number)
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "scheduler_of_a_test.py").write_text(TARGET)
    path = [str(tmp_path), str(Path(standby.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(SpawnProcess._Popen))
    yield importlib.import_module("scheduler_of_a_test")


@pytest.fixture
def pool(target: Any) -> Iterator[Pool]:
    found = Pool(1, [{"run_scheduler_process": target.__name__}])
    yield found
    found.drop()


def run(target: Any, code: int) -> tuple[int, int, dict[str, str], dict[str, str]]:
    """Run the target in a process as SGLang does; returns process, parent, and the variables at its import and at its start."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=target.run_scheduler_process, args=(writer, code))
    process.start()
    writer.close()
    found: tuple[int, int, dict[str, str], dict[str, str]] = reader.recv()
    process.join(60)
    assert process.exitcode == code and process.pid == found[0] and not process.is_alive()
    return found


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_next_process_runs_in_the_interpreter_that_waits(
    target: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (waiting,) = pool.waiting
    pool.install()
    monkeypatch.setenv("SGLANG_RUN_ID", "7")
    pid, parent, before, now = run(target, 3)
    assert (pid, parent) == (waiting.pid, os.getpid()) and not pool.waiting
    assert before["SGLANG_RUN_ID"] == "" and now["SGLANG_RUN_ID"] == "7"
    again, _, before, _ = run(target, 4)  # none waits
    assert again != pid and before["SGLANG_RUN_ID"] == "7"


def test_a_process_that_needs_another_environment_starts_as_usual(
    target: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (waiting,) = pool.waiting
    pool.install()
    monkeypatch.setenv("OTHER", "x")
    pid, _, before, _ = run(target, 0)
    assert pid != waiting.pid and before["OTHER"] == "x" and ended(waiting.pid)
    assert "run_scheduler_process imports SGLang again, because these changed: OTHER" in caplog.text


def test_an_interpreter_that_has_ended_is_replaced(target: Any, pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    (waiting,) = pool.waiting
    pool.install()
    os.kill(waiting.pid, signal.SIGKILL)
    while Path(f"/proc/{waiting.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert run(target, 0)[0] != waiting.pid
    assert "has ended; a new one starts" in caplog.text


def test_what_no_process_took_ends(target: Any, pool: Pool) -> None:
    (waiting,) = pool.waiting
    pool.drop()
    assert ended(waiting.pid) and not pool.waiting


@pytest.mark.parametrize(
    "name, value, passed",
    [
        ("NCCL_NVLS_ENABLE", "0", True),
        ("SGLANG_ENABLE_TORCH_COMPILE", "0", True),
        ("SGLANG_ENABLE_TORCH_COMPILE", "1", False),  # read while the attention backends are imported
        ("CUDA_MODULE_LOADING", "AUTO", True),
        ("CUDA_MODULE_LOADING", "EAGER", False),
        ("LD_PRELOAD", "x.so", False),
        ("CUDA_VISIBLE_DEVICES", "1", False),
    ],
)
def test_only_variables_that_are_read_late_may_change(name: str, value: str, passed: bool) -> None:
    assert changes({"A": "1"}, {"A": "1", name: value}) == ([] if passed else [name])
    assert changes({"A": "1", "B": "2"}, {"B": "2"}) == ["A"]


@pytest.mark.parametrize(
    "arguments, count",
    [
        ({}, 1),
        ({"tp_size": 4, "pp_size": 2}, 8),
        ({"dp_size": 2, "enable_dp_attention": True, "tp_size": 2}, 0),
        ({"enable_memory_saver": True}, 0),
    ],
)
def test_there_is_one_interpreter_per_scheduler(arguments: dict[str, Any], count: int) -> None:
    choices = build.Choices(arguments=arguments, device="cuda")
    assert build._environment(choices, {})[standby.VARIABLE] == str(count)
