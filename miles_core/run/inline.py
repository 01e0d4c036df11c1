"""The runtime that keeps trainer, engine and driver in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.engine import Engine
from miles_core.contracts.policy import Policy
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import Learned, LearnerHandle, PolicyParts, Runtime
from miles_core.contracts.trainer import TrainerPart
from miles_core.contracts.transport import SyncReport
from miles_core.data.sample import Sample
from miles_core.mismatch.parity import check_sides
from miles_core.mismatch.same_model import check_same_model
from miles_core.plugin.detect import gpu_facts, model_facts
from miles_core.precision.schedule import Precisions
from miles_core.run.rank import Rank, combined, divided, in_order
from miles_core.train.learner import Learner


class InlineRuntime(Runtime):
    """Trainer, engine and driver in one process."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.engines: list[Engine] = []
        self.ranks: list[Rank] = []

    async def build(self, policy: Policy) -> PolicyParts:
        run, options = self.run, self.run.config.run
        # The driver is the only worker here: what it could not know while planning must hold now.
        run.plan.check_deferred([*gpu_facts(), *model_facts(policy.hf_checkpoint)])
        trainer = run.hooks.make("trainer", options.trainer, run=run, policy=policy)
        rank = Rank(run, policy, trainer)
        self.ranks.append(rank)
        if options.colocate:  # an engine may take as much memory as it finds when it starts
            rank.sleep()
        engine: Engine = run.hooks.make("engine", options.engine, run=run, policy=policy)
        self.engines.append(engine)
        await engine.start()
        if options.colocate:
            await engine.sleep(["cache"])
            rank.wake()
        check_same_model(run, policy, trainer, engine)
        parity = check_sides(run, policy, trainer, engine)
        rank.connect(engine)
        learner = InlineLearner(rank)
        engine.resend = learner.resend
        return PolicyParts(policy, learner, engine, rank.precisions, parity)

    async def close(self) -> None:
        for engine in self.engines:
            await engine.stop()
        for rank in self.ranks:
            rank.close()


class InlineLearner(LearnerHandle):
    """A trainer of one rank, called directly."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._holds: int | None = None  # the step whose weights were trained and not pushed yet

    @property
    def learner(self) -> Learner:
        """The learner itself."""
        return self.rank.learner

    async def learn(self, samples: Sequence[Sample], step: int) -> Learned:
        (share,) = divided(samples, self.rank.run.config.train, replicas=1)
        metrics = combined([self.rank.learn(share, step)])
        self._holds = step + 1
        return Learned(metrics, share.count, in_order([share], [self.learner.tokens]))

    async def intact(self) -> bool:
        return self.rank.learner.intact

    async def supervise(self, samples: Sequence[Sample], lr: float) -> dict[str, float]:
        return combined([self.rank.supervise(samples, lr)])

    async def reset_optimizer(self) -> None:
        self.rank.trainer.reset_optimizer()

    async def log_probs(self, samples: Sequence[Sample], emulation: Emulation = AS_TRAINED) -> list[np.ndarray]:
        return self.rank.log_probs(samples, emulation)

    async def take_snapshot(self, version: int) -> None:
        self.rank.take_snapshot(version)
        self.snapshot_version = version

    async def rebuild(self, precisions: Precisions) -> None:
        self.rank.rebuild(precisions)

    async def push(self, version: int, plain: bool = False) -> SyncReport:
        report = await self.rank.push(version, plain)
        self._holds = None
        return report

    async def resend(self) -> None:
        """Give the engine the weights as they are now, without a step of the loop."""
        await self.rank.push(self.rank.run.step if self._holds is None else self._holds)

    async def stage(self, version: int | None) -> None:
        await self.rank.stage(version)

    async def sleep(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        self.rank.sleep(parts)

    async def wake(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        self.rank.wake(parts)

    async def save(self, directory: Path) -> None:
        self.rank.save(directory)

    async def load(self, directory: Path) -> None:
        self.rank.load(directory)
        self._holds = None

    async def export(self, directory: Path) -> None:
        self.rank.export(directory)


def make_runtime(run: Run) -> InlineRuntime:
    """The runtime named ``inline``."""
    return InlineRuntime(run)
