"""What the schedules' tests watch a run with."""

from __future__ import annotations

import pytest

WATCH = """
from miles_core.plugin import hookimpl

@hookimpl
def on_start(run):
    run.state["samples"] = {}
    run.state["trained"] = []

@hookimpl
def on_sample(run, sample):
    run.state["samples"][sample.index] = sample

@hookimpl
def on_batch(run, batch):
    run.state["trained"].append(batch.index.tolist())
"""


@pytest.fixture
def watched(toy_run, tmp_path):
    """``watched(plugins, **options)``: a toy run whose state has ``samples`` by number, and the numbers ``trained`` step by
    step."""
    (tmp_path / "watch.py").write_text(WATCH)

    def call(plugins=(), **options):
        return toy_run([*plugins, str(tmp_path / "watch.py")], **options)

    return call
