"""One rank of a policy's trainer: the learner, and how its weights leave.

A runtime makes one of these in each process that trains and calls the same method on all of them, in one order (most are
collectives). ``divided`` and ``combined`` are its halves around ``learn``: what each replica gets, and what came back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.engine import Engine
from miles_core.contracts.policy import Policy
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import TrainedTokens
from miles_core.contracts.trainer import Trainer, TrainerPart
from miles_core.contracts.transport import SyncReport, Transport
from miles_core.data.means import add, means
from miles_core.data.sample import Sample
from miles_core.data.world import World, shares
from miles_core.precision.schedule import Precisions, precisions
from miles_core.precision.snapshot import Snapshot, snapshot
from miles_core.sync.copy import CopyTransport
from miles_core.sync.precision import make_codec
from miles_core.train.learner import Learner
from miles_core.train.steps import optimiser_steps

if TYPE_CHECKING:
    from miles_core.config.groups import Train as TrainOptions

Pairs = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Share:
    """What one replica gets of a rollout: its samples, the optimiser step of each, how many steps there are, and the samples'
    positions in the rollout."""

    samples: list[Sample]
    step_of: list[int]
    count: int
    positions: list[int]


class Rank:
    """Trainer, learner, codec and transport of one policy in one process.

    Args:
        run: this process's.
        policy: the one that is trained.
        trainer: this rank of it.
    """

    def __init__(self, run: Run, policy: Policy, trainer: Trainer) -> None:
        self.run, self.trainer = run, trainer
        self.learner = Learner(run, policy, trainer)
        self.precisions = precisions(run.config, 0)
        self.codec = make_codec(run, policy)
        self.snapshot: Snapshot | None = None
        self._engine: Engine | None = None
        self._asleep: set[TrainerPart] = set()
        self._transport: Transport | None = None

    @property
    def world(self) -> World:
        """Where this rank stands."""
        return self.trainer.world

    def connect(self, engine: Engine) -> None:
        """Weights go to ``engine`` from now on (it may be a front of engines in other processes)."""
        run, self._engine = self.run, engine
        self._close_transport()
        self._transport = run.hooks.make(
            "transport",
            run.config.run.transport,
            run=run,
            policy=self.learner.policy,
            engine=engine,
            world=self.world,
        )

    def learn(self, share: Share, step: int) -> Pairs:
        """Train on this replica's share of a rollout, after ``step`` completed ones."""
        return self.learner.learn(share.samples, share.step_of, share.count, step)

    def supervise(self, samples: Sequence[Sample], lr: float) -> Pairs:
        """One supervised step on this replica's samples."""
        return self.learner.supervise(samples, lr)

    def log_probs(self, samples: Sequence[Sample], emulation: Emulation = AS_TRAINED) -> list[np.ndarray]:
        """See ``LearnerHandle.log_probs``."""
        with self.trainer.emulating(emulation, self.codec, self.snapshot):
            return self.learner.log_probs(samples)

    def take_snapshot(self, version: int) -> None:
        """See ``LearnerHandle.take_snapshot``."""
        self.snapshot = snapshot(self.trainer.units(everywhere=True), self.codec, version)

    def rebuild(self, due: Precisions) -> None:
        """See ``LearnerHandle.rebuild``."""
        if due.train != self.precisions.train:
            self.trainer.rebuild(due.train)
        self.precisions = due
        self.codec = make_codec(self.run, self.learner.policy, due.rollout)

    async def push(self, version: int, plain: bool = False) -> SyncReport:
        """Encode this rank's part of the weights and send it as ``version``; see ``LearnerHandle.push``."""
        if self._engine is None or self._transport is None:
            raise RuntimeError("this rank was not connected to an engine")
        if plain:
            self._transport.close()
            self._transport = CopyTransport(self._engine)
        asleep = "weights" in self._asleep  # an engine died in its turn and has none
        if asleep:
            self.wake(["weights"])
        units = self.learner.units(self._transport.everywhere)
        report = await self._transport.send(self.codec.encode(units, self._transport.room), version)
        if asleep:
            self.sleep(["weights"])
        return report

    async def stage(self, version: int | None) -> None:
        """See ``LearnerHandle.stage``."""
        if self._transport is None:
            raise RuntimeError("this rank was not connected to an engine")
        self._transport.unstage()
        if version is not None:
            units = self.learner.units(self._transport.everywhere)
            await self._transport.stage(self.codec.encode(units, self._transport.room), version)

    def sleep(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        """See ``LearnerHandle.sleep``."""
        shared = self._transport is not None and self._transport.shares
        given = [part for part in parts if part != "weights" or not shared]
        self._asleep |= {*given}
        self.trainer.sleep(given)

    def wake(self, parts: Sequence[TrainerPart] = ("weights", "optimizer")) -> None:
        """See ``LearnerHandle.wake``."""
        self._asleep -= {*parts}
        self.trainer.wake(parts)

    def close(self) -> None:
        """Release transport and trainer."""
        self._close_transport()
        self.trainer.close()

    def _close_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def save(self, directory: Path) -> None:
        """Write this rank's share of a checkpoint."""
        self.learner.save(directory)

    def load(self, directory: Path) -> None:
        """Inverse of ``save``."""
        self.learner.load(directory)

    def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint; a collective."""
        self.trainer.export(directory, self.run.tokenizer)


def divided(samples: Sequence[Sample], options: TrainOptions, replicas: int) -> list[Share]:
    """One share a replica: whole groups, the same number of optimiser steps for everybody."""
    step_of, count = optimiser_steps(samples, options)
    return [
        Share([samples[i] for i in mine], [step_of[i] for i in mine], count, mine)
        for mine in shares(samples, step_of, replicas)
    ]


def in_order(parts: Sequence[Share], seen: Sequence[Sequence[TrainedTokens]]) -> list[TrainedTokens]:
    """What each replica saw of its share, in the order of the rollout; empty where nothing was recorded."""
    found: dict[int, TrainedTokens] = {}
    for share, tokens in zip(parts, seen, strict=True):
        found |= zip(share.positions, tokens, strict=bool(tokens))
    return [found[at] for at in sorted(found)]


def combined(replicas: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """name -> sum / weight over one rank of each replica; quantities of weight 0 were not measured."""
    totals: dict[str, tuple[float, float]] = {}
    for pairs in replicas:
        add(totals, pairs)
    return means(totals)
