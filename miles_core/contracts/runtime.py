"""The runtime contract: the processes in which the parts of a run execute.

The driver calls a policy's trainer through a ``LearnerHandle`` and its engine through the engine contract. A runtime builds both;
the driver does not depend on where they run. The runtime ``inline`` keeps them in the driver's process. A runtime with one process
per GPU works as follows (``miles_workers`` implements everything except starting the processes):

- A trainer rank is a process that executes one call at a time. Calls are collectives, in the same order on every rank. Each rank
  calls ``worker_run`` to check the plan, received as JSON, against its installation and GPU, and builds its own run, hooks and
  ``Learner``.
- With several ranks, the default process group of ``torch.distributed`` is initialised in each rank before ``make_trainer``: gloo
  for CPU tensors and NCCL for GPU tensors, one rank per process. A rank sees only its own GPU. The trainer derives its ``World``
  from the process group.
- The handle sends each call to all ranks. ``learn`` and ``supervise`` split samples by whole groups over data-parallel ranks. All
  ranks of one model replica receive the same samples; the (sum, weight) pairs are added over replicas, from one rank per replica.
- The engine of a policy is an ``Engine`` that forwards to processes with one engine each. ``generate`` selects one of them (the same
  one for all requests of a group); every other call goes to all of them.
- Weights do not pass through the driver: ``push`` runs export, encoding and transport in the trainer ranks. A rank's transport
  has its own pool of the engines, through which it calls ``receive`` of each. Tensors passed to it are sent as bytes.
- With ``--colocate``, ranks and engines share devices. The learner's handle moves their memory (``miles_core.train.memory``). The runtime places
  them on the devices and uses the same calls to free memory while it builds each of them.
- A process that dies or stops responding raises ``WorkerLost``. The driver's pool of engines replaces a lost one. A lost trainer rank loses the
  training since the last checkpoint: the driver calls ``recover`` of the runtime and repeats the steps from that checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.checkpoint.digest import FileDigest
from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.engine import Engine
from miles_core.contracts.learned import Gradients as Gradients
from miles_core.contracts.learned import Learned as Learned
from miles_core.contracts.learned import Metrics as Metrics
from miles_core.contracts.learned import TopLogProbs as TopLogProbs
from miles_core.contracts.learned import TrainedTokens as TrainedTokens
from miles_core.contracts.run import Policy, Run
from miles_core.contracts.trainer import Pass
from miles_core.contracts.transport import SyncReport
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError, MilesError, WorkerLost
from miles_core.precision.quantizer import SideParity
from miles_core.precision.schedule import Precisions

#: ``async learn(samples, step) -> Learned``, the function that ``wrap_learn`` wraps.
Learn = Callable[[Sequence[Sample], int], Awaitable["Learned"]]
#: Options that ``LearnerHandle.configure`` changes in a running trainer.
CHANGEABLE = (
    *("train.lr", "train.min_lr", "train.weight_decay", "train.clip_grad", "algorithm.entropy_coef"),
    *("train.adam_beta1", "train.adam_beta2", "train.adam_eps"),
    *("algorithm.eps_clip", "algorithm.eps_clip_high", "algorithm.kl_loss_coef", "algorithm.kl_coef"),
)


class LearnerHandle(ABC):
    """Interface to the trainer of one policy, for the driver and for plugins in ``wrap_learn``. Metrics are means over tokens and ranks.

    ``miles_core.train.local_learner`` calls a trainer in the driver's process directly; ``miles_workers.learner_group`` calls ranks in other
    processes.

    Args:
        run: the driver's run.
        policy: the policy of the trainer.

    Attributes:
        learned: result of the last ``learn``; the loop reads from it the metrics of critics, which learn in another policy's ``wrap_learn``.
        pending: the step whose weights are trained but not pushed yet; None if there is none.
        unsynced: whether ``load`` changed the weights since the last ``push``; the loop then pushes those of frozen policies too.
        snapshot_version: version of the last ``take_snapshot``.
        check: called with the samples of each ``learn`` first; may raise a MilesError. None checks nothing.
    """

    def __init__(self, run: Run, policy: Policy) -> None:
        self.run, self.policy = run, policy
        self.learned: Learned | None = None
        self.pending: int | None = None
        self.unsynced = False
        self.snapshot_version: int | None = None
        self.check: Callable[[Sequence[Sample]], Awaitable[None]] | None = None

    @property
    def current_version(self) -> int:
        """The version under which the current weights are pushed."""
        return self.run.step if self.pending is None else self.pending

    def require_training(self) -> None:
        """Raise ConfigError for a frozen policy."""
        if not self.policy.learns:
            raise ConfigError(
                f"the policy {self.policy.name} is frozen and cannot learn; give it the role train or critic"
            )

    async def check_learns(self, samples: Sequence[Sample]) -> None:
        """Raise ConfigError for a frozen policy, and what ``check`` raises for the samples."""
        self.require_training()
        if self.check is not None:
            await self.check(samples)

    def record_learned(self, learned: Learned, step: int) -> Learned:
        """Record the result of ``learn`` for ``step``, and return it."""
        self.learned, self.pending = learned, step + 1
        self.policy.trained += learned.steps
        return learned

    def check_changeable(self, options: Mapping[str, float]) -> None:
        """Raise ConfigError for options that are not in ``CHANGEABLE``."""
        if unknown := sorted({*options} - {*CHANGEABLE}):
            raise ConfigError(
                f"the option {unknown[0]} of the policy {self.policy.name} cannot change during a run; those that can are "
                f"{', '.join(CHANGEABLE)}"
            )

    @abstractmethod
    async def learn(self, samples: Sequence[Sample], step: int) -> Learned:
        """Train on one rollout of whole groups. ``step`` is the number of completed steps. Raises ConfigError for a frozen policy."""

    async def is_intact(self) -> bool:
        """Whether weights and optimiser are in the state after a completed ``learn``.

        Also True after a ``learn`` that failed before its first optimiser step. False if unknown; a failing run then saves nothing.
        """
        return False

    @abstractmethod
    async def supervise(self, samples: Sequence[Sample], lr: float) -> Metrics:
        """Train one supervised step."""

    async def forward_backward(
        self, samples: Sequence[Sample], loss: str, settings: Mapping[str, float] | None = None
    ) -> Gradients:
        """Add the gradients of a loss to those that the trainer holds until ``optimizer_step``: half a training step, without the advantages,
        corrections and ``wrap_learn`` of ``learn``. Any other call that changes the weights drops the held gradients.

        Args:
            samples: their fields ``loss_weight``, ``advantages`` and ``old_log_probs``, each [response_length], are what the loss reads.
            loss: a name, see ``miles_core.train.named_losses``.
            settings: settings of the loss.

        Raises:
            ConfigError, DataError: the loss or the samples are invalid; nothing has changed.
            MilesError: the trainer lacks the capability ``divisible_step``, or it failed and has dropped all held gradients.
        """
        raise MilesError(f"{type(self).__name__} cannot divide a training step")

    async def optimizer_step(self, lr: float | None = None) -> Metrics:
        """Run the optimiser on the held gradients. ``lr`` replaces the scheduled learning rate, in which case the schedule does not advance.

        Raises:
            MilesError: no gradients are held.
            NonFiniteError: the gradients are not finite, and dropped; weights and optimiser are unchanged.
        """
        raise MilesError(f"{type(self).__name__} cannot divide a training step")

    @abstractmethod
    async def reset_optimizer(self) -> None:
        """Reset the optimiser's moments and the learning-rate schedule after a warm start."""

    async def log_probs(self, samples: Sequence[Sample], emulation: Emulation = AS_TRAINED) -> list[np.ndarray]:
        """Compute the policy's log-probabilities of each sample's response tokens, [response_length] float32.

        Entries are 0 where the loss mask is 0. The computation is that of a training step (pass ``verify``), changed by
        ``emulation``. It uses the fields present in the samples, as training does; fields may be absent.
        """
        found = await self.columns(samples, "verify", ("log_probs",), emulation=emulation)
        return [columns["log_probs"] for columns in found]

    @abstractmethod
    async def columns(
        self,
        samples: Sequence[Sample],
        kind: Pass,
        wanted: Collection[str],
        top_k: int = 0,
        emulation: Emulation = AS_TRAINED,
    ) -> list[dict[str, np.ndarray]]:
        """Compute several columns of each sample's response tokens in one pass: name -> [response_length, ...].

        Args:
            samples: the samples.
            kind: ``old``, ``ref`` (the reference weights) or ``verify``.
            wanted: names of columns, ``top_k``: their number of most probable tokens, as for ``Trainer.columns``.
            emulation: changes the computation.
        """

    async def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Compute a critic's values, [response_length] float32 per sample.

        Entry t is the value of the state in which response token t is chosen; 0 where the loss mask is 0. Raises MilesError if the
        policy has no value head.
        """
        return [columns["values"] for columns in await self.columns(samples, "verify", ("values",))]

    async def top_log_probs(self, samples: Sequence[Sample], k: int) -> list[TopLogProbs]:
        """Compute the ``k`` most probable tokens and their log-probabilities at each response position.

        Where the loss mask is 0, tokens and log-probabilities are 0. Raises MilesError if the trainer does not support this.
        """
        found = await self.columns(samples, "verify", ("top_tokens", "top_log_probs"), k)
        return [TopLogProbs(columns["top_tokens"], columns["top_log_probs"]) for columns in found]

    @abstractmethod
    async def take_snapshot(self, version: int) -> None:
        """Copy the weights, as ``push`` would send them now, to host memory for passes with ``Emulation.snapshot``.

        The copy replaces the previous one. ``version`` is the engine's version of these weights (-1 before the first sync).
        """

    @abstractmethod
    async def rebuild(self, precisions: Precisions) -> None:
        """Change the precision of training and of pushed weights."""

    @abstractmethod
    async def push(self, version: int, plain: bool = False) -> SyncReport:
        """Encode the weights and deliver them to the policy's engine as ``version``.

        With ``plain``, this and all later pushes use core's copy transport. Raises SyncError if the weights did not arrive.
        """

    async def sent_checksums(self) -> Mapping[str, int]:
        """Return the checksums of the tensors that the last push or stage sent, as the engine should hold them: checkpoint name ->
        checksum (``Engine.weight_checksums``). Large versions are compared in parts, so some tensors may be absent; {} if this run
        compares none."""
        return {}

    async def stage(self, version: int | None) -> None:
        """Transfer as much of ``version`` as the transport supports while the engine generates, before ``push`` of that version.

        None discards staged weights. Raises SyncError if the weights did not arrive; the engine then keeps its current weights.
        """

    @abstractmethod
    async def save(self, directory: Path, later: bool = False) -> None:
        """Write the trainer's state. With ``later`` it may be copied now and written while training continues."""

    async def collect_digests(self) -> Mapping[str, FileDigest] | None:
        """Return the digests of the files that the last ``save`` wrote, by path in its directory; None while they are being written.

        The driver reads files without a digest here and computes it. Raises the error of a file that could not be written.
        """
        return {}

    @abstractmethod
    async def load(self, directory: Path) -> None:
        """Read the state that a ``save`` wrote, possibly that of another policy with the same model.

        A frozen policy reads the weights only. From then on it saves them, so that a resumed run has them; the loop pushes them to the
        policy's engine after the step.
        """

    async def configure(self, options: Mapping[str, float]) -> None:
        """Change options of the policy from the next ``learn`` on: path -> value, any of ``CHANGEABLE``.

        Values are those of ``Policy.options`` afterwards. Checkpoints do not contain them; whoever sets them restores them after a
        resume. Raises ConfigError for another option or an invalid value, MilesError if the trainer does not support this.
        """
        raise MilesError(f"{type(self).__name__} cannot change the options of a running trainer")

    @abstractmethod
    async def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint."""


@dataclass(eq=False)
class PolicyParts:
    """The parts of one policy, on the driver.

    Attributes:
        policy: the policy.
        learner: handle to all ranks of the policy's trainer.
        engine: the policy's engine; None if the policy does not generate.
        precisions: current precisions of trainer and engine.
        parity: parity of the quantisers of trainer and engine, for sides with a number format, measured after building.
        learn: ``learner.learn`` with the plugins' wrappers; set when all policies are built.
    """

    policy: Policy
    learner: LearnerHandle
    engine: Engine | None
    precisions: Precisions
    parity: Sequence[SideParity] = ()
    learn: Learn | None = None

    @property
    def serving(self) -> Engine:
        """The policy's engine.

        Raises:
            ConfigError: this policy has no engine.
        """
        if self.engine is None:
            raise ConfigError(
                f"the policy {self.policy.name} (role {self.policy.role}) has no engine, so it cannot generate; give it "
                "generates=True, or name another policy"
            )
        return self.engine


class Producer(ABC):
    """Generates and scores the groups of a run: in the driver's process, or in rollout workers (``--rollout-workers``).

    Attributes:
        answers: statistics of requests and rollouts of training, metric -> (sum, count); the collector reads and clears them.
        make_queue: makes the queue of prompts from the arguments of ``PromptQueue``; None for that class.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[float, float]] = {}
        self.make_queue: Callable[..., Any] | None = None

    @abstractmethod
    async def start(self) -> None:
        """Start the rollout functions. Called before the first group."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop them. Called however the run ends, and also if ``start`` failed."""

    @abstractmethod
    async def produce(self, samples: Sequence[Sample], evaluation: bool = False) -> list[Sample]:
        """Generate and score the samples of one prompt. The result includes the samples that failed, without a reward.

        The call is cancelled when its group is dropped; ``abort`` follows.

        Args:
            samples: pending samples.
            evaluation: use the sampling parameters of evaluation.
        """

    @abstractmethod
    async def abort(self, samples: Collection[int]) -> None:
        """Make the engines abort all requests of the samples with these indexes, whose ``produce`` was cancelled."""


class Runtime(ABC):
    """Builds the parts of each policy and releases them."""

    @abstractmethod
    async def build(self, policy: Policy) -> PolicyParts:
        """Build the learner and the engine of a policy. The engine is started, but has no weights of this run yet."""

    async def discard(self, parts: PolicyParts) -> None:
        """Release the parts of one policy while the others stay. Raises MilesError if this runtime cannot."""
        raise MilesError(f"{type(self).__name__} releases its policies together, at the end of the run")

    @abstractmethod
    async def close(self) -> None:
        """Release all parts, including those of an incomplete build."""

    def producer(self, local: Producer, parts: Sequence[PolicyParts]) -> Producer:
        """Return the producer of the run's groups: ``local``, or one that passes them to rollout workers. Requires the capability
        ``rollout_workers`` if ``--rollout-workers`` is given. Called again after ``recover``."""
        return local

    def recovers(self, lost: WorkerLost) -> bool:
        """Whether ``recover`` can replace a lost worker of this runtime."""
        return False

    async def recover(self, lost: WorkerLost) -> None:
        """Rebuild the lost workers. The parts remain the same objects and have their initial weights.

        Raises:
            WorkerLost: ``lost``, if the workers cannot be rebuilt or the number of restarts is used up.
        """
        raise lost

    async def release(self) -> None:
        """Unblock learners that wait in a call, if possible, so that a stopping run can save their state. Engines are not used
        afterwards."""

    def metrics(self) -> dict[str, float]:
        """Return ``busy/NAME`` (seconds) and ``idle/NAME`` (fraction of time) since the last call, for each worker process."""
        return {}

    def activity(self) -> Mapping[str, int]:
        """Return the number of pending calls of each worker process, for the live display."""
        return {}
