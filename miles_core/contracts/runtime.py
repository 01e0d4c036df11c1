"""Where the parts run.

The driver talks to a policy's trainer through a ``LearnerHandle`` and to its engine through the engine contract; a
runtime makes both, and the driver does not know how far away they are. ``inline`` keeps them in this process. With a
process for each GPU (``miles_runtime`` is all of this but for the processes themselves):

- A trainer rank is a process that takes one call at a time (calls are collectives, in one order on every rank). Each builds
  its own run, hooks and ``Learner`` after ``worker_run`` accepted the plan that came as JSON; the driver
  compares the digests with ``same_plan``.
- Before ``make_trainer`` is called in several ranks, the default process group of ``torch.distributed`` is initialised in each of
  them: gloo for tensors on a CPU and NCCL for those on a GPU, one rank a process, and a rank sees its own GPU only. The trainer
  derives its ``World`` from it.
- The handle sends each call to all ranks. ``learn`` and ``supervise`` divide samples by whole groups over data-parallel
  ranks, the same share for all ranks of one model replica, and add up the (sum, weight) pairs of one rank a replica.
- The engine of a policy is an ``Engine`` in front of processes that hold one engine each: ``generate`` picks one (a group stays
  together), every other call goes to all of them.
- Weights never pass through the driver: ``push`` runs export, encoding and transport inside the ranks. A rank's
  transport gets the same kind of engine front, to tell the engines to receive; tensors that are handed to that front travel as bytes.
- With ``--colocate`` both kinds run on the same devices. Core makes them take turns (``miles_runtime.turns``); the runtime places
  them there and sees to it, with the same calls, that each has room while it is built.
- A process that dies or does not answer is told as ``WorkerLost``. A lost engine is replaced behind its front. A lost rank takes the learner's
  work since the last checkpoint with it: the driver asks the runtime to ``recover`` and repeats the steps from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.engine import Engine
from miles_core.contracts.policy import Policy
from miles_core.contracts.transport import SyncReport
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError, WorkerLost
from miles_core.precision.quantizer import SideParity
from miles_core.precision.schedule import Precisions

Metrics = dict[str, float]
#: ``async learn(samples, step) -> Learned``, what ``wrap_learn`` goes around.
Learn = Callable[[Sequence[Sample], int], Awaitable["Learned"]]


@dataclass(frozen=True)
class TrainedTokens:
    """What training saw of one sample's response tokens, [response_length] float32 each; what it did not compute is None.

    Attributes:
        log_probs: under the policy before its first optimiser step on this rollout (with ``--use-rollout-logprobs``: before
            the step that trained the sample); 0 where the loss mask is 0.
        advantages: as they entered the loss.
    """

    log_probs: np.ndarray | None
    advantages: np.ndarray | None


@dataclass(frozen=True)
class Learned:
    """What training on one rollout did.

    Attributes:
        metrics: its metrics.
        steps: how many optimiser steps it made.
        tokens: what it saw of each sample, in the order they were given; empty where the run keeps no samples.
    """

    metrics: Metrics
    steps: int
    tokens: Sequence[TrainedTokens] = ()


@dataclass(frozen=True)
class TopLogProbs:
    """The most probable tokens at each response position of a sample.

    Attributes:
        tokens: [response_length, k] int32, most probable first.
        log_probs: [response_length, k] float32 over the whole vocabulary, at the sampling temperature.
    """

    tokens: np.ndarray
    log_probs: np.ndarray


class LearnerHandle(ABC):
    """What the driver, and a plugin in ``wrap_learn``, may ask of one policy's trainer, all ranks of it. Metrics are means over
    tokens and ranks."""

    #: the last ``learn``; the loop takes the metrics of policies that learn in another policy's ``wrap_learn`` from it
    learned: Learned | None = None

    @abstractmethod
    async def learn(self, samples: Sequence[Sample], step: int) -> Learned:
        """Train on one rollout (whole groups), after ``step`` completed ones. ConfigError for a frozen policy."""

    async def intact(self) -> bool:
        """Whether weights and optimiser are those of a completed ``learn``: True as well after one that failed before its
        first optimiser step. What is not known is answered with False; a run that fails then saves nothing."""
        return False

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

    @abstractmethod
    async def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """What a critic expects of each state, [response_length] float32 for each sample: entry t is the value of the state in which
        response token t is chosen; 0 where the loss mask is 0. MilesError where the policy has no value head."""

    @abstractmethod
    async def top_log_probs(self, samples: Sequence[Sample], k: int) -> list[TopLogProbs]:
        """The ``k`` most probable tokens at each response position, with their log-probabilities; token 0 with log-probability 0 where
        the loss mask is 0. MilesError where the trainer cannot tell them."""

    #: the version that ``take_snapshot`` put aside last
    snapshot_version: int | None = None

    @abstractmethod
    async def take_snapshot(self, version: int) -> None:
        """Put a copy of the weights aside, as ``push`` would send them now, for passes with ``Emulation.snapshot``: one copy
        in host memory, which replaces the last. ``version``: what the engine calls them (-1 before the first sync)."""

    @abstractmethod
    async def rebuild(self, precisions: Precisions) -> None:
        """Train, and encode what is pushed, in another precision from now on."""

    @abstractmethod
    async def push(self, version: int, plain: bool = False) -> SyncReport:
        """Encode the weights and deliver them to the policy's engine as ``version``. With ``plain`` by core's copy, now and from
        then on. SyncError when they did not arrive."""

    async def stage(self, version: int | None) -> None:
        """Bring ``version`` to the engine while it generates, as far as the transport can; ``push`` of it comes next. None forgets
        what was staged. SyncError when it did not arrive; the engine goes on with what it had."""

    @abstractmethod
    async def save(self, directory: Path) -> None:
        """Write the trainer's state."""

    @abstractmethod
    async def load(self, directory: Path) -> None:
        """Read the trainer's state."""

    @abstractmethod
    async def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint."""


@dataclass(eq=False)
class PolicyParts:
    """What one policy is made of, on the driver.

    Attributes:
        policy: whose they are.
        learner: its trainer, all ranks of it.
        engine: where its requests go; None for a policy that does not generate.
        precisions: what the two sides compute in now.
        parity: how each side with a number format quantises, measured when it was built.
        learn: ``learner.learn`` with what plugins wrap around it; set when all policies are built.
    """

    policy: Policy
    learner: LearnerHandle
    engine: Engine | None
    precisions: Precisions
    parity: Sequence[SideParity] = ()
    learn: Learn | None = None

    @property
    def serving(self) -> Engine:
        """The engine of a policy that has one.

        Raises:
            ConfigError: this policy has none.
        """
        if self.engine is None:
            raise ConfigError(
                f"the policy {self.policy.name} (role {self.policy.role}) has no engine, so it cannot generate; give it "
                "generates=True, or name another policy"
            )
        return self.engine


class Runtime(ABC):
    """Builds the parts of each policy and releases them."""

    @abstractmethod
    async def build(self, policy: Policy) -> PolicyParts:
        """Learner and engine of a policy, the engine started but without weights of this run."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything that was built, also after a failure half-way."""

    def recovers(self, error: Exception) -> bool:
        """Whether ``recover`` will be able to do something about what a part of this runtime raised."""
        return False

    async def recover(self, lost: WorkerLost) -> None:
        """Rebuild what was lost: the parts stay the same objects, with the weights that they started with. Raises ``lost`` where
        that cannot be done, or not again."""
        raise lost

    async def release(self) -> None:
        """Free the learners from calls that they wait in, as far as possible: the run stops and saves what they hold. Engines are not used
        any more."""

    def metrics(self) -> dict[str, float]:
        """Since the last call, ``busy/NAME`` in seconds and ``idle/NAME`` (share of the time) of each worker in a process of its
        own."""
        return {}

    def activity(self) -> Mapping[str, int]:
        """For each such worker how many calls it has to answer now; shown live."""
        return {}
