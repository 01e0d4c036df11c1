"""``LearnerHandle`` in this process and with workers: the same calls have the same results."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from miles_core.config.load import load
from miles_core.contracts.run import Policy
from miles_core.contracts.runtime import LearnerHandle, PolicyParts
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError
from miles_core.run.make import make_run
from miles_core.run.parts import runtime_of
from miles_core.run.prepare import apply_plan, prepare
from miles_core.train.local_learner import LocalLearner
from miles_testing.doubles import remote
from miles_testing.toy import toy_arguments
from miles_workers.learner_group import LearnerGroup

KINDS: dict[str, type[LearnerHandle]] = {"inline": LocalLearner, "remote": LearnerGroup}


@dataclass
class Made:
    """The parts of one policy, outside of a training loop."""

    runner: asyncio.Runner
    parts: PolicyParts

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the learner."""
        return self.runner.run(getattr(self.parts.learner, method)(*args))


@pytest.fixture(params=KINDS)
def made(request, tmp_path) -> Iterator[Made]:
    config = load(toy_arguments([remote.__file__], tmp_path / "run", runtime=request.param, num_steps_per_rollout=2))
    plan, catalogue = prepare(config)
    run = make_run(apply_plan(config, plan), plan, catalogue, tmp_path)
    run.hooks.on("on_start", run=run)
    with asyncio.Runner() as runner:
        runtime = runtime_of(run)
        found = Made(runner, runner.run(runtime.build(run.policy)))
        assert type(found.parts.learner) is KINDS[request.param]
        try:
            yield found
        finally:
            runner.run(runtime.close())


def samples(count: int = 4) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        Sample(
            tokens=random.integers(3, 30, 5 + index % 2).tolist(),
            response_length=3,
            reward=float(index % 2),
            rollout_log_probs=[-3.0] * 3,
            group_index=index // 2,
            index=index,
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What the first implementation returned, by test."""
    return {}


def same(results: dict[str, Any], name: str, value: Any) -> None:
    """Compare a value with that of the other implementation."""
    expected = results.setdefault(name, value)
    np.testing.assert_allclose(value, expected, atol=1e-6)


def test_what_learn_returns_and_records(made, results):
    learned = made.call("learn", samples(), 0)
    learner = made.parts.learner
    assert learned.steps == 2 == learner.policy.trained and learner.learned is learned
    assert learner.current_version == 1 and made.call("is_intact")
    same(results, "loss", [learned.metrics["train/loss"], learned.metrics["train/grad_norm"]])
    same(results, "recorded", np.concatenate([seen.advantages for seen in learned.tokens]))


def test_scores_come_in_the_order_of_the_samples(made, results):
    found = made.call("log_probs", samples())
    (columns, *_) = made.call("columns", samples(), "verify", ["log_probs", "entropy"])
    assert [len(row) for row in found] == [3] * 4 and columns.keys() == {"log_probs", "entropy"}
    np.testing.assert_allclose(columns["log_probs"], found[0], atol=1e-6)
    same(results, "log_probs", np.concatenate(found))
    best = made.call("top_log_probs", samples(), 2)
    same(results, "best", np.concatenate([each.tokens for each in best]))


def test_a_push_serves_its_version(made):
    report = made.call("push", 0)
    assert report.version == 0 == made.parts.serving.version and report.nbytes > 0
    made.call("learn", samples(), 0)
    made.call("stage", 1)
    assert made.call("push", 1).version == 1 == made.parts.serving.version
    assert made.parts.learner.current_version == made.parts.learner.run.step
    made.runner.run(made.parts.learner.resend())
    assert made.parts.serving.version == made.parts.learner.run.step


def test_saved_weights_are_loaded_and_count_as_not_pushed(made, tmp_path):
    before = np.concatenate(made.call("log_probs", samples()))
    made.call("save", tmp_path / "saved")
    assert made.call("collect_digests")
    made.call("supervise", samples(), 0.1)
    assert not np.allclose(np.concatenate(made.call("log_probs", samples())), before)
    made.call("load", tmp_path / "saved")
    assert made.parts.learner.unsynced
    np.testing.assert_array_equal(np.concatenate(made.call("log_probs", samples())), before)
    made.call("push", 0)
    assert not made.parts.learner.unsynced


def test_options_are_changed_or_refused(made):
    made.call("configure", {"train.lr": 5e-3})
    assert made.call("learn", samples(), 0).metrics["train/lr"] == 5e-3
    with pytest.raises(ConfigError, match=r"rollout\.top_p of the policy policy cannot change"):
        made.call("configure", {"rollout.top_p": 0.5})


def test_a_frozen_policy_does_not_learn(made):
    made.parts.learner.policy = Policy(name="judge", role="frozen")
    with pytest.raises(ConfigError, match="judge is frozen"):
        made.call("learn", samples(), 0)


def test_a_snapshot_keeps_the_weights_of_its_version(made):
    from miles_core.contracts.emulation import Emulation

    made.call("take_snapshot", 3)
    before = np.concatenate(made.call("log_probs", samples()))
    made.call("supervise", samples(), 0.1)
    again = np.concatenate(made.call("log_probs", samples(), Emulation(snapshot=True)))
    np.testing.assert_allclose(again, before, atol=1e-4)
    assert made.parts.learner.snapshot_version == 3
