"""Kernels that are compiled while everybody waits."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from miles_sglang import compiling


def process(directory: Path, pid: int, name: str, session: int) -> None:
    (directory / str(pid)).mkdir()
    (directory / str(pid) / "stat").write_text(f"{pid} ({name}) R 1 {session} {session} 0 -1 4194304")


def test_compilers_are_those_of_the_session(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    for pid, (name, session) in enumerate([("cicc", 7), ("ptxas", 7), ("nvcc", 8), ("python (x) y", 7)], start=1):
        process(tmp_path, pid, name, session)
    assert compiling.compilers(7, tmp_path) == {"cicc", "ptxas"}
    assert compiling.compilers(9, tmp_path) == compiling.compilers(7, tmp_path / "sys") == set()


def test_what_takes_long_is_said_now_and_then_and_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, now = [set(), {"nvcc"}, {"cicc"}, {"cicc"}, {"ptxas", "nvcc"}, set(), set()], iter(range(0, 1000, 40))
    monkeypatch.setattr(compiling, "LOOK_S", 0)
    monkeypatch.setattr(compiling, "compilers", lambda session: looks.pop(0))
    monkeypatch.setattr(compiling, "monotonic", lambda: float(next(now)))
    caplog.set_level(logging.INFO)
    with pytest.raises(IndexError):
        asyncio.run(compiling.watch(7))
    assert [record.message for record in caplog.records] == [
        "SGLang is compiling kernels for 40 s (cicc)",
        "SGLang is compiling kernels for 120 s (nvcc, ptxas)",
        "SGLang's kernels are compiled (160 s); it keeps them for later starts",
    ]
