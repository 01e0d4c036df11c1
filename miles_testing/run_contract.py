"""Contract tests for what plugins add to a run: any part, and rollout functions, rewards and optimizers.

Subclass a contract and name the plugins and options of a toy run that uses the part::

    class TestMyReward(RewardContract):
        plugins = ("mine",)
        options = {"rm_type": "mine"}
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from miles_testing.toy import ToyRun, toy_run

#: Metrics that a clock decides.
_TIMES = re.compile(r"time|time/|.*per_second|.*seconds|.*/waiting")


class RunContract:
    """Contract tests for any part of a run: a run depends on its options and seed alone, and continues from a checkpoint.

    Attributes:
        plugins: plugins of the run.
        options: its options, as for ``toy_run``.
        steps: steps of an uninterrupted run, at least 2.
    """

    plugins: Sequence[str] = ()
    options: Mapping[str, Any] = {}
    steps = 2

    def run(self, **options: Any) -> ToyRun:
        """Run a toy run with these plugins and options."""
        return toy_run(list(self.plugins), **{"steps": self.steps, **self.options, **options})

    def whole_run(self) -> ToyRun:
        """Return an uninterrupted run without further options, which the tests of a suite share."""
        suite = type(self)
        if "_whole" not in vars(suite):
            suite._whole = self.run()
        return suite._whole

    _whole: ClassVar[ToyRun]

    def test_metrics_are_finite(self) -> None:
        for record in self.whole_run().metrics:
            wrong = {name: value for name, value in comparable(record).items() if not math.isfinite(value)}
            assert not wrong, f"step {record['step']}: {wrong}"

    def test_two_runs_are_equal(self) -> None:
        """Fails for a part that keeps state between runs or draws random numbers without the seed."""
        one, two = self.whole_run(), self.run()
        assert _all_compared(one) == _all_compared(two)
        assert [_answer(sample) for sample in one.samples] == [_answer(sample) for sample in two.samples]

    def test_a_resumed_run_equals_an_uninterrupted_one(self, tmp_path: Path) -> None:
        whole = self.whole_run()
        self.run(directory=tmp_path / "run", steps=1)
        resumed = self.run(directory=None, save=None, load=tmp_path / "run")
        assert _all_compared(resumed) == _all_compared(whole)


class RolloutFunctionContract(RunContract):
    """Contract tests for a rollout function (``make_generate``)."""

    def test_samples_hold_the_engines_tokens(self) -> None:
        samples = self.whole_run().samples
        assert samples
        for sample in samples:
            length = sample["response_length"]
            assert 0 < length < len(sample["tokens"]), "a response without tokens, or a sample without a prompt"
            mask = sample["loss_mask"] or [1] * length
            log_probs = sample["rollout_log_probs"]
            assert len(mask) == length and len(log_probs) == length
            trained = [value for value, counts in zip(log_probs, mask, strict=True) if counts]
            assert all(value <= 1e-6 for value in trained), "a trained token has a log-probability above 0"


class RewardContract(RunContract):
    """Contract tests for a reward (``make_reward``), of single samples or of groups."""

    def test_every_sample_has_a_reward(self) -> None:
        for sample in self.whole_run().samples:
            rewards = sample["reward"].values() if isinstance(sample["reward"], dict) else [sample["reward"]]
            assert all(isinstance(value, float) and math.isfinite(value) for value in rewards)


class OptimizerContract(RunContract):
    """Contract tests for an optimizer (``make_optimizer``).

    Attributes:
        standstill: options with which no weight may change.
    """

    standstill: Mapping[str, Any] = {"lr": 0.0, "weight_decay": 0.0}

    def test_it_changes_the_weights(self) -> None:
        first, last = (self.run(steps=steps).trainer.optimizer.masters for steps in (1, 2))
        assert any(not (first[name] == last[name]).all() for name in first), "no weight changed in the second step"

    def test_its_state_is_in_the_checkpoint(self, tmp_path: Path) -> None:
        whole = self.whole_run().trainer.optimizer
        self.run(directory=tmp_path / "run", steps=1)
        resumed = self.run(directory=None, save=None, load=tmp_path / "run").trainer.optimizer
        with whole.on_device(), resumed.on_device():
            ours, theirs = whole.tensors(), resumed.tensors()
            assert ours.keys() == theirs.keys()
            assert [name for name in ours if not (ours[name] == theirs[name]).all()] == []

    def test_a_learning_rate_of_0_changes_nothing(self) -> None:
        first, last = (self.run(steps=steps, **self.standstill).trainer.optimizer.masters for steps in (1, 2))
        assert all((first[name] == last[name]).all() for name in first)


def comparable(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a step that depend on options and seed alone, not on a clock."""
    return {n: v for n, v in record.items() if isinstance(v, (int, float)) and not _TIMES.match(n)}


def _all_compared(done: ToyRun) -> list[dict[str, float]]:
    return [comparable(record) for record in done.metrics if record["step"] > 0]


def _answer(sample: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sample["tokens"]), sample["reward"] if not isinstance(sample["reward"], dict) else repr(
        sample["reward"]
    )
