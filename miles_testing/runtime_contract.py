"""Contract tests for runtimes: compare a run with the same run in one process."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from miles_testing.toy import ToyRun, toy_run


class RuntimeContract:
    """Subclass it and set the attributes that select the runtime. All tests use one run.

    Attributes:
        plugins: plugins of the run, including the file of a runtime that is not installed.
        options: further flags of the toy run, including ``runtime``.
        rel: relative tolerance of gradient norms; 0 if the runtime sums the same tokens in the same order as one process.
        workers: names of processes that must have metrics; empty for a runtime in one process.
    """

    plugins: Sequence[str] = ()
    options: ClassVar[Mapping[str, Any]] = {}
    rel: float = 0.0
    workers: Sequence[str] = ()
    steps = 3

    @pytest.fixture(scope="class")
    def one(self) -> ToyRun:
        """The run in one process with the installed plugins, one step longer."""
        named = [name for name in self.plugins if not name.endswith(".py")]
        return toy_run(named, steps=self.steps + 1)

    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
        """The run under test."""
        directory = tmp_path_factory.mktemp("runtime") / "run"
        return toy_run(self.plugins, directory=directory, steps=self.steps, save_interval=1, **self.options)

    def test_it_computes_what_one_process_does(self, done: ToyRun, one: ToyRun) -> None:
        assert [m["step"] for m in done.metrics] == list(range(1, self.steps + 1))
        for found, wanted in zip(done.metrics, one.metrics, strict=False):
            self._check_same(found, wanted)

    def test_its_checkpoint_is_continued_in_one_process(self, done: ToyRun, one: ToyRun, tmp_path: Path) -> None:
        named = [name for name in self.plugins if not name.endswith(".py")]
        (last,) = (done.directory / "checkpoints").glob(f"step_*{self.steps}")
        load = shutil.copytree(
            last, tmp_path / last.name
        )  # outside the run directory, whose options would be used otherwise
        again = toy_run(named, directory=tmp_path / "again", steps=self.steps + 1, load=load)
        assert [m["step"] for m in again.metrics] == [self.steps + 1]
        self._check_same(again.metrics[0], one.metrics[-1])

    def test_time_and_weights_are_accounted_for(self, done: ToyRun) -> None:
        for metrics in done.metrics:
            assert min(metrics[f"time/{phase}"] for phase in ("rollout", "prepare", "train", "sync")) > 0
            assert metrics["sync/bytes"] > 0
            for name in self.workers:
                assert metrics[f"busy/{name}"] > 0 and 0 <= metrics[f"idle/{name}"] < 1
        assert [each.policy.version for each in done.parts] == [self.steps]

    def _check_same(self, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Check that rewards and gradient norms agree."""
        assert found["reward/mean"] == pytest.approx(wanted["reward/mean"])
        assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=self.rel or 1e-9)
