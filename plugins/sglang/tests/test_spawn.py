"""SGLang's process starts before the trainer is built, and is used if the engine wants the same process."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_links import link

from miles_sglang import build, early
from miles_sglang.early import Early
from miles_sglang.spawn import EARLY, WORKER, Spawned, spawn


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it ended before or while its state was read
        return False


async def until_ended(pid: int) -> None:
    for _ in range(100):
        if not is_alive(pid):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"process {pid} still runs")


def test_an_engine_uses_the_process_that_was_started_for_it(tmp_path: Path) -> None:
    async def used() -> None:
        taken: dict[Path, Spawned] = {}
        one = link(tmp_path, "good", early=taken)
        taken[one.log_file] = spawned = spawn(WORKER, one.changes, one.log_file)
        process = await spawned.starting
        assert (await one.start())["tp_size"] == 2 and not taken
        assert one._process is process
        await one.restart({})
        assert one._process is not process and not is_alive(process.pid)
        await one.stop()

    asyncio.run(used())


def test_a_process_imports_the_engine_before_it_has_arguments(tmp_path: Path) -> None:
    async def waiting() -> None:
        one = link(tmp_path, "good")
        spawned = spawn(WORKER, one.changes, one.log_file)
        process = await spawned.starting
        for _ in range(600):
            if "imported" in one.log_file.read_text():
                break
            await asyncio.sleep(0.05)
        assert one.log_file.read_text().split() == ["imported"] and is_alive(process.pid)
        spawned.drop()
        await until_ended(process.pid)

    asyncio.run(waiting())


def test_a_process_with_another_environment_ends_and_is_not_used(tmp_path: Path) -> None:
    async def used() -> None:
        taken: dict[Path, Spawned] = {}
        one = link(tmp_path, "good", early=taken)
        taken[one.log_file] = spawned = spawn(WORKER, {**one.changes, "X": "1"}, one.log_file)
        process = await spawned.starting
        await one.start()
        assert one._process is not None and one._process.pid != process.pid
        await until_ended(process.pid)
        await one.stop()

    asyncio.run(used())


@pytest.mark.parametrize(
    "runtime, worker, policies",
    [
        ("inline", "", 3),
        ("ray", "engine-1", 1),
        ("ray", "student-engine-0", 3),
        ("ray", "", 1),
        ("ray", "trainer-0", 1),
        ("ray", "judge-engine-0", 3),
    ],
)
def test_the_process_that_will_have_an_engine_starts_it_and_ends_what_no_engine_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, worker: str, policies: int
) -> None:
    environment = link(tmp_path, "good").changes
    wanted: list[str] = []
    monkeypatch.setattr(early, "environment_of", lambda run, policy: wanted.append(policy.name) or environment)
    for module in (early, build):
        monkeypatch.setattr(module, "worker_name", lambda: worker)
    generates = {"judge": False, "student": True, "teacher": True}
    found = [SimpleNamespace(name=name, generates=on) for name, on in generates.items()][
        : policies if policies > 1 else 0
    ]
    config = SimpleNamespace(run=SimpleNamespace(runtime=runtime, engine="sglang"))
    one = [SimpleNamespace(name="policy", generates=True)]
    run = SimpleNamespace(config=config, policies=found or one, state={}, directory=tmp_path)

    async def started() -> None:
        hooks = Early()
        hooks.on_start(run=run)
        if worker in ("trainer-0", "judge-engine-0") or (runtime == "ray" and not worker):
            assert EARLY not in run.state
            return
        (spawned,) = run.state[EARLY].values()
        assert wanted == ["policy" if policies == 1 else "student"]
        began = time.monotonic()
        process = await spawned.starting
        assert is_alive(process.pid) and build.log_file_of(run).is_file() and time.monotonic() - began < 30
        hooks.on_stop(run=run)
        await until_ended(process.pid)

    asyncio.run(started())


def test_an_engine_on_several_machines_does_not_use_it(tmp_path: Path) -> None:
    async def spanned() -> None:
        taken: dict[Path, Spawned] = {}
        one = link(tmp_path, "good", early=taken)
        taken[one.log_file] = spawned = spawn(WORKER, one.changes, one.log_file)
        process = await spawned.starting
        one.span(2, 1, "127.0.0.1:9")
        assert not taken
        await until_ended(process.pid)

    asyncio.run(spanned())
