"""The runtime that keeps trainer, engine and driver in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.engine import Engine
from miles_core.contracts.runtime import Learned, LearnerHandle, Metrics, PolicyParts, Runtime
from miles_core.contracts.transport import SyncReport, Transport
from miles_core.data.means import means
from miles_core.data.sample import Sample
from miles_core.mismatch.parity import check_sides
from miles_core.mismatch.same_model import check_same_model
from miles_core.plugin.detect import gpu_facts, model_facts
from miles_core.precision.schedule import Precisions, precisions
from miles_core.precision.snapshot import Snapshot, snapshot
from miles_core.sync.precision import make_codec
from miles_core.train.learner import Learner
from miles_core.train.steps import optimiser_steps

if TYPE_CHECKING:
    from miles_core.contracts.policy import Policy
    from miles_core.contracts.run import Run


class InlineRuntime(Runtime):
    """Trainer, engine and driver in one process."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.engines: list[Engine] = []
        self.learners: list[Learner] = []

    async def build(self, policy: Policy) -> PolicyParts:
        run, options = self.run, self.run.config.run
        # The driver is the only worker here: what it could not know while planning must hold now.
        run.plan.check_deferred([*gpu_facts(), *model_facts(policy.hf_checkpoint)])
        trainer = run.hooks.make("trainer", options.trainer, run=run, policy=policy)
        learner = Learner(run, policy, trainer)
        self.learners.append(learner)
        engine: Engine = run.hooks.make("engine", options.engine, run=run, policy=policy)
        self.engines.append(engine)
        await engine.start()
        check_same_model(run, policy, trainer, engine)
        parity = check_sides(run, policy, trainer, engine)
        transport = run.hooks.make("transport", options.transport, run=run, policy=policy, engine=engine)
        start = precisions(run.config, 0)
        return PolicyParts(policy, InlineLearner(run, learner, transport, start), engine, start, parity)

    async def close(self) -> None:
        for engine in self.engines:
            await engine.stop()
        for learner in self.learners:
            learner.trainer.close()


class InlineLearner(LearnerHandle):
    """A learner called directly."""

    def __init__(self, run: Run, learner: Learner, transport: Transport, precisions: Precisions) -> None:
        self.run, self.learner, self.transport, self.precisions = run, learner, transport, precisions
        self.codec = make_codec(run, learner.policy)
        self.snapshot: Snapshot | None = None

    async def learn(self, samples: Sequence[Sample]) -> Learned:
        step_of, count = optimiser_steps(samples, self.run.config.train)
        return Learned(means(self.learner.learn(samples, step_of, count)), count)

    async def supervise(self, samples: Sequence[Sample], lr: float) -> Metrics:
        return means(self.learner.supervise(samples, lr))

    async def reset_optimizer(self) -> None:
        self.learner.trainer.reset_optimizer()

    async def log_probs(self, samples: Sequence[Sample], emulation: Emulation = AS_TRAINED) -> list[np.ndarray]:
        with self.learner.trainer.emulating(emulation, self.codec, self.snapshot):
            return self.learner.log_probs(samples)

    async def take_snapshot(self, version: int) -> None:
        self.snapshot = snapshot(self.learner.trainer.units(), self.codec, version)
        self.snapshot_version = version

    async def rebuild(self, precisions: Precisions) -> None:
        if precisions.train != self.precisions.train:
            self.learner.trainer.rebuild({"precision": precisions.train})
        self.precisions = precisions
        self.codec = make_codec(self.run, self.learner.policy, precisions.rollout)

    async def push(self, version: int) -> SyncReport:
        return await self.transport.send(self.codec.encode(self.learner.units(self.transport.everywhere)), version)

    async def save(self, directory: Path) -> None:
        self.learner.save(directory)

    async def load(self, directory: Path) -> None:
        self.learner.load(directory)

    async def export(self, directory: Path) -> None:
        self.learner.trainer.export(directory, self.run.tokenizer)


def make_runtime(run: Run) -> InlineRuntime:
    """The runtime named ``inline``."""
    return InlineRuntime(run)
