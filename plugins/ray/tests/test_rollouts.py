"""Rollout workers as actors; the test kills one."""

from __future__ import annotations

import pytest

from miles_testing import toy_run

#: The first worker that finishes a sample of the second step dies.
FAULTS = """
import os, signal
from miles_core.plugin import hookimpl

@hookimpl
def on_sample(run, sample):
    flag = run.directory / "killed"
    if run.step == 1 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_samples_are_those_of_one_process_although_a_worker_dies(cluster, tmp_path):
    (tmp_path / "faults.py").write_text(FAULTS)
    there = toy_run(
        [str(tmp_path / "faults.py")],
        directory=tmp_path / "run",
        steps=3,
        runtime="ray",
        rollout_workers=2,
        log_level="info",
    )
    here = toy_run(steps=3)

    def rows(done):
        return [{key: value for key, value in row.items() if "log_probs" not in key} for row in done.samples]

    assert rows(there) == rows(here)
    assert all(f"busy/rollout-{number}" in m for m in there.metrics for number in range(2))
    log = (there.directory / "run.log").read_text()
    assert "was lost: its process died" in log and "it is replaced (1 of 3 times)" in log
    assert "rollout-1: miles_runtime.output: process" in log
