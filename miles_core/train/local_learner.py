"""The handle to a trainer in the driver's process: each method calls the learner directly."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from miles_core.checkpoint.digest import FileDigest
from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.engine import Engine
from miles_core.contracts.runtime import Gradients, Learned, LearnerHandle, Metrics
from miles_core.contracts.trainer import ALL_PARTS, Pass, TrainerPart
from miles_core.contracts.transport import SyncReport
from miles_core.data.batch import means
from miles_core.data.sample import Sample
from miles_core.precision.schedule import Precisions
from miles_core.train.data_shard import DataShard, optimiser_steps
from miles_core.train.memory import memory_of
from miles_core.train.named_losses import check_loss, vocabulary_of
from miles_core.train.rank import Rank


class LocalLearner(LearnerHandle):
    """Calls the only rank of a policy's trainer, without copies. One call at a time: others wait until a push or a save is complete.

    Args:
        rank: the learner, already connected to ``engine``.
        engine: the policy's engine; None for a policy that does not generate.
    """

    def __init__(self, rank: Rank, engine: Engine | None = None) -> None:
        super().__init__(rank.run, rank.policy)
        self.rank = rank
        self.memory = memory_of(rank.run, self._hold, engine)
        self._turn = asyncio.Lock()

    async def learn(self, samples: Sequence[Sample], step: int) -> Learned:
        await self.check_learns(samples)
        steps, count = optimiser_steps(samples, self.rank.config.train)
        async with self.memory.train(), self._turn:
            shard = DataShard([*samples], steps, count, [*range(len(samples))], self.policy.version)
            pairs, tokens = self.rank.learn(shard, step)
        return self.record_learned(Learned(means(pairs), count, tokens), step)

    async def is_intact(self) -> bool:
        return self.rank.is_intact()

    async def supervise(self, samples: Sequence[Sample], lr: float) -> Metrics:
        async with self.memory.train(), self._turn:
            return means(self.rank.supervise(samples, lr))

    async def forward_backward(
        self, samples: Sequence[Sample], loss: str, settings: Mapping[str, float] | None = None
    ) -> Gradients:
        self.require_training()
        check_loss(samples, loss, settings or {}, vocabulary_of(self.run))
        async with self.memory.train(), self._turn:
            pairs, found = self.rank.forward_backward(samples, loss, settings or {})
        return Gradients(means(pairs), found)

    async def optimizer_step(self, lr: float | None = None) -> Metrics:
        async with self.memory.train(), self._turn:
            pairs = self.rank.apply_gradients(lr)
        self.policy.trained += 1
        return means(pairs)

    async def reset_optimizer(self) -> None:
        async with self.memory.read(ALL_PARTS), self._turn:
            self.rank.reset_optimizer()

    async def columns(
        self,
        samples: Sequence[Sample],
        kind: Pass,
        wanted: Collection[str],
        top_k: int = 0,
        emulation: Emulation = AS_TRAINED,
    ) -> list[dict[str, np.ndarray]]:
        async with self.memory.read(("weights",)), self._turn:
            return self.rank.columns(samples, wanted, top_k, kind, emulation)

    async def sent_checksums(self) -> Mapping[str, int]:
        return self.rank.sent_checksums()

    async def take_snapshot(self, version: int) -> None:
        async with self.memory.read(("weights",)), self._turn:
            self.rank.take_snapshot(version)
        self.snapshot_version = version

    async def rebuild(self, precisions: Precisions) -> None:
        async with self.memory.read(("weights",)), self._turn:
            self.rank.rebuild(precisions)

    async def push(self, version: int, plain: bool = False) -> SyncReport:
        async with self.memory.push(), self._turn:
            report = await self.rank.push(version, plain)
        self.pending, self.unsynced = None, False
        return report

    async def stage(self, version: int | None) -> None:
        if (
            not self.memory.colocated
        ):  # otherwise the engine does not generate during training, so staging has no benefit
            async with self._turn:
                await self.rank.stage(version)

    async def save(self, directory: Path, later: bool = False) -> None:
        async with (
            self.memory.read(ALL_PARTS),
            self._turn,
        ):  # writing takes long, and the driver may serve requests meanwhile
            await asyncio.to_thread(self.rank.save, directory.absolute(), later)

    async def collect_digests(self) -> Mapping[str, FileDigest] | None:
        async with self._turn:
            return self.rank.collect_digests()

    async def load(self, directory: Path) -> None:
        async with self.memory.train(), self._turn:
            self.rank.load(directory.absolute())
        self.pending, self.unsynced = None, True

    async def configure(self, options: Mapping[str, float]) -> None:
        self.check_changeable(options)
        async with self._turn:
            self.rank.configure(options)

    async def export(self, directory: Path) -> None:
        async with self.memory.read(("weights",)), self._turn:
            self.rank.export(directory.absolute())

    async def resend(self) -> None:
        """Send the current weights to the engine again, outside the training loop: it was restarted."""
        async with self._turn:
            await self.rank.push(self.current_version)
        self.pending, self.unsynced = None, False

    async def _hold(self, parts: Sequence[TrainerPart]) -> None:
        async with self._turn:
            self.rank.hold(parts)
