"""Where the parts run.

The driver talks to a policy's trainer through a ``LearnerHandle`` and to its engine through the engine contract; a
runtime makes both, and the driver does not know how far away they are. ``inline`` keeps them in this process. With Ray:

- A trainer rank is an actor with one GPU and ``max_concurrency=1`` (calls are collectives: one at a time, in one order
  on every rank). Each builds its own run, hooks and ``Learner`` after ``miles_core.plugin.worker.accept`` took the plan
  that came as JSON; the driver compares the digests with ``same_plan``.
- The handle sends each call to all ranks. ``learn`` and ``supervise`` divide samples by whole groups over data-parallel
  ranks, the same share for all ranks of one model replica, and add up the (sum, weight) pairs of one rank a replica.
- ``policy.engine`` is an ``Engine`` in front of actors that hold one engine each: ``generate`` picks one (a group stays
  together), every other call goes to all of them.
- Weights never pass through the driver: ``push`` runs export, encoding and transport inside the ranks. A rank's
  transport gets the same kind of engine front, to tell the engines to receive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from miles_core.data.sample import Sample
from miles_core.plugin.detect import gpu_facts, model_facts
from miles_core.precision.schedule import current
from miles_core.precision.select import check_parity, make_codec
from miles_core.rollout.engine import Engine
from miles_core.same_model import check_same_model
from miles_core.sync.kept import Kept, keep
from miles_core.sync.transport import SyncReport, Transport
from miles_core.train.emulation import AS_TRAINED, Emulation
from miles_core.train.learner import Learner
from miles_core.train.steps import optimiser_steps

if TYPE_CHECKING:
    from miles_core.policy import Policy
    from miles_core.precision.schedule import Precisions
    from miles_core.run import Run

Metrics = dict[str, float]


class LearnerHandle(ABC):
    """What the driver asks of one policy's trainer, all ranks of it. Metrics are means over tokens and ranks."""

    @abstractmethod
    async def learn(self, samples: Sequence[Sample]) -> Metrics:
        """Train on one rollout (whole groups)."""

    @abstractmethod
    async def supervise(self, samples: Sequence[Sample], lr: float) -> Metrics:
        """One supervised step."""

    @abstractmethod
    async def reset_optimizer(self) -> None:
        """Forget moments and schedule after a warm start."""

    @abstractmethod
    async def log_probs(self, samples: Sequence[Sample], emulation: Emulation = AS_TRAINED) -> list[np.ndarray]:
        """The policy's log-probabilities of each sample's response tokens, [response_length] float32, 0 where its loss
        mask is 0; computed like those of a training step (pass ``verify``), or as ``emulation`` says. Fields that the
        samples carry take part, as in training; ones that they do not carry are not missed."""

    #: the version that ``keep`` put aside last
    kept_version: int | None = None

    @abstractmethod
    async def keep(self, version: int) -> None:
        """Put a copy of the weights aside, as ``push`` would send them now, for passes with ``Emulation.kept``: one copy
        in host memory, which replaces the last. ``version``: what the engine calls them (-1 before the first sync)."""

    @abstractmethod
    async def rebuild(self, precisions: Precisions) -> None:
        """Train, and encode what is pushed, in another precision from now on."""

    @abstractmethod
    async def push(self, version: int) -> SyncReport:
        """Encode the weights and deliver them to the policy's engine as ``version``."""

    @abstractmethod
    async def save(self, directory: Path) -> None:
        """Write the trainer's state."""

    @abstractmethod
    async def load(self, directory: Path) -> None:
        """Read the trainer's state."""

    @abstractmethod
    async def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint."""


class Runtime(ABC):
    """Builds the parts of each policy and releases them."""

    @abstractmethod
    async def build(self, policy: Policy) -> None:
        """Set ``policy.learner`` and ``policy.engine``, the engine started but without weights of this run."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything that was built, also after a failure half-way."""


class InlineRuntime(Runtime):
    """Trainer, engine and driver in one process."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.engines: list[Engine] = []
        self.learners: list[Learner] = []

    async def build(self, policy: Policy) -> None:
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
        policy.parity = check_parity(run, policy, trainer, engine)
        policy.engine = engine
        transport = run.hooks.make("transport", options.transport, run=run, policy=policy, engine=engine)
        policy.learner = InlineLearner(run, learner, transport)

    async def close(self) -> None:
        for engine in self.engines:
            await engine.stop()
        for learner in self.learners:
            learner.trainer.close()


class InlineLearner(LearnerHandle):
    """A learner called directly."""

    def __init__(self, run: Run, learner: Learner, transport: Transport) -> None:
        self.run, self.learner, self.transport = run, learner, transport
        self.codec = make_codec(run, learner.policy)
        self.kept: Kept | None = None

    async def learn(self, samples: Sequence[Sample]) -> Metrics:
        return means(self.learner.learn(samples, *optimiser_steps(samples, self.run.config.train)))

    async def supervise(self, samples: Sequence[Sample], lr: float) -> Metrics:
        return means(self.learner.supervise(samples, lr))

    async def reset_optimizer(self) -> None:
        self.learner.trainer.reset_optimizer()

    async def log_probs(self, samples: Sequence[Sample], emulation: Emulation = AS_TRAINED) -> list[np.ndarray]:
        with self.learner.trainer.emulating(emulation, self.codec, self.kept):
            return self.learner.log_probs(samples)

    async def keep(self, version: int) -> None:
        self.kept = keep(self.learner.trainer.units(), self.codec, version)
        self.kept_version = version

    async def rebuild(self, precisions: Precisions) -> None:
        if precisions.train != current(self.run, self.learner.policy).train:
            self.learner.trainer.rebuild({"precision": precisions.train})
        self.codec = make_codec(self.run, self.learner.policy, precisions.rollout)

    async def push(self, version: int) -> SyncReport:
        return await self.transport.send(self.codec.encode(self.learner.units(self.transport.everywhere)), version)

    async def save(self, directory: Path) -> None:
        self.learner.save(directory)

    async def load(self, directory: Path) -> None:
        self.learner.load(directory)

    async def export(self, directory: Path) -> None:
        self.learner.trainer.export(directory, self.run.tokenizer)


def means(pairs: dict[str, tuple[float, float]]) -> Metrics:
    """name -> sum / weight; quantities of weight 0 were not measured."""
    return {name: total / weight for name, (total, weight) in pairs.items() if weight}


def make_runtime(run: Run) -> InlineRuntime:
    """The runtime named ``inline``."""
    return InlineRuntime(run)
