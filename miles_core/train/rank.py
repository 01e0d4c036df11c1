"""One rank of a policy's trainer: the learner, and the transport of its weights.

Each training process holds one rank. The driver calls the same methods in the same order on all ranks, because most are collectives.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from miles_core.checkpoint.digest import FileDigest
from miles_core.checkpoint.tensor_file import Saving
from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.contracts.engine import Engine
from miles_core.contracts.run import Policy, Run
from miles_core.contracts.trainer import ALL_PARTS, Pass, Trainer, TrainerPart
from miles_core.contracts.transport import SyncReport, Transport
from miles_core.data.sample import Sample
from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.data.world import ALONE, World
from miles_core.errors import MilesError
from miles_core.precision.schedule import Precisions, precisions
from miles_core.precision.snapshot import Snapshot, snapshot
from miles_core.sync.push import CopyTransport, make_codec
from miles_core.sync.stream import WeightStream
from miles_core.train.learner import Learner


class SentWeights(Protocol):
    """Computes checksums of the weights that pass through it (``miles_workers.transport.SentWeights``)."""

    def watch(self, units: Iterator[Encoded], version: int) -> Iterator[Encoded]: ...

    def checksums(self) -> dict[str, int]: ...


class Rank(Learner):
    """A learner with codec and transport, in one process. ``LocalLearner`` calls one in the driver's process, a ``RankWorker`` holds one in
    another process."""

    def __init__(self, run: Run, policy: Policy, trainer: Trainer) -> None:
        super().__init__(run, policy, trainer)
        self.precisions = precisions(self.config, 0)
        self.codec = make_codec(run, policy)
        self.snapshot: Snapshot | None = None
        self._engine: Engine | None = None
        self._held: set[TrainerPart] = {*ALL_PARTS}
        self._transport: Transport | None = None
        self._saving: Saving | None = None
        self._sent: SentWeights | None = None
        self._stream = WeightStream()

    @property
    def world(self) -> World:
        """Position of this rank."""
        return self.trainer.world

    @property
    def transport(self) -> Transport:
        """The transport to the engine. Raises RuntimeError before ``connect``."""
        if self._transport is None:
            raise RuntimeError("this rank was not connected to an engine")
        return self._transport

    def connect(self, engine: Engine, world: World = ALONE) -> None:
        """Send weights to ``engine`` from now on. world: this rank's position among the ranks that send."""
        self._engine = engine
        self._close_transport()
        self._transport = self.run.hooks.make(
            "transport",
            self.run.config.run.transport,
            run=self.run,
            policy=self.policy,
            engine=engine,
            world=world,
        )
        self._watch_weights()

    def columns(
        self,
        samples: Sequence[Sample],
        wanted: Collection[str],
        top_k: int = 0,
        kind: Pass = "verify",
        emulation: Emulation = AS_TRAINED,
    ) -> list[dict[str, np.ndarray]]:
        """See ``LearnerHandle.columns``."""
        with self.trainer.emulate(emulation, self.codec, self.snapshot):
            return super().columns(samples, wanted, top_k, kind)

    def log_probs(self, samples: Sequence[Sample], emulation: Emulation = AS_TRAINED) -> list[np.ndarray]:
        """See ``LearnerHandle.log_probs``."""
        return [found["log_probs"] for found in self.columns(samples, {"log_probs"}, emulation=emulation)]

    def save(self, directory: Path, later: bool = False) -> None:
        """Write this rank's part of a checkpoint and record the digests of its files, see ``LearnerHandle.save``."""
        self._saving = Saving(directory, later)
        with self._saving:
            super().save(directory)

    def collect_digests(self) -> Mapping[str, FileDigest] | None:
        """See ``LearnerHandle.collect_digests``."""
        return {} if self._saving is None else self._saving.digests()

    def reset_optimizer(self) -> None:
        """See ``Trainer.reset_optimizer``."""
        self.trainer.reset_optimizer()

    def take_snapshot(self, version: int) -> None:
        """See ``LearnerHandle.take_snapshot``."""
        with closing(self.units("snapshot", everywhere=True)) as units:
            self.snapshot = snapshot(units, self.codec, version)

    def rebuild(self, due: Precisions) -> None:
        """See ``LearnerHandle.rebuild``."""
        if due.train != self.precisions.train:
            self.trainer.rebuild(due.train)
        self.precisions = due
        self.codec = make_codec(self.run, self.policy, due.rollout)
        self._stream.clear()
        self._watch_weights()

    async def push(self, version: int, plain: bool = False) -> SyncReport:
        """Encode this rank's part of the weights and send it as ``version``; see ``LearnerHandle.push``."""
        transport = self.transport
        if plain and self._engine is not None:
            transport.close()
            transport = self._transport = CopyTransport(self._engine)
        held = {*self._held}  # excludes the weights if an engine died during its turn
        needed: list[TrainerPart] = ["weights", *held]
        self.hold(needed)
        with self._weights(transport, version) as (units, encoded):
            if self.world.sends:
                report = await transport.send(encoded, version)
            else:
                report = SyncReport(version, 0, 0, consume(units))
        self.hold([*held])
        return report

    async def stage(self, version: int | None) -> None:
        """See ``LearnerHandle.stage``."""
        transport = self.transport
        if not transport.staging:
            return
        transport.unstage()
        if version is not None:
            with self._weights(transport, version) as (units, encoded):
                if self.world.sends:
                    await transport.stage(encoded, version)
                else:
                    consume(units)

    def sent_checksums(self) -> dict[str, int]:
        """Return the checksums of this rank's part of the weights sent last, see ``LearnerHandle.sent_checksums``."""
        return {} if self._sent is None else self._sent.checksums()

    def _watch_weights(self) -> None:
        """Compute checksums of what is sent from now on, if the run and the engine compare them."""
        options, engine = self.run.config, self._engine
        checks = options.model.self_check or options.run.verify_logprobs
        if engine is not None and checks and "weight_checksums" in engine.capabilities:
            self._sent = self.run.hooks.make("sent_weights", "checksums", codec=self.codec, dtypes=engine.weight_dtypes)

    @contextmanager
    def _weights(self, transport: Transport, version: int) -> Iterator[tuple[Iterator[WeightUnit], Iterator[Encoded]]]:
        """Context with two iterators over the weights of one sync: the trainer's units, and their encoded tensors. Read only one of them."""
        wrappers = self.weight_wrappers("sync")
        # with --colocate, the engine frees its memory between syncs, also that of codes which a kept stream would refer to
        moves = self.run.config.run.colocate and self.codec.format is not None
        memory = None if wrappers or moves else self.trainer.find_memory()
        with closing(self.units("sync", wrappers=wrappers)) as units:
            encoded = self._stream.encode(units, self.codec, transport, memory)
            yield units, encoded if self._sent is None else self._sent.watch(encoded, version)

    def hold(self, parts: Sequence[TrainerPart]) -> None:
        """Keep only these parts of the trainer in device memory, plus weights that the engine reads in place."""
        shared = self._transport is not None and self._transport.shares
        wanted = {*parts, "weights"} if shared else {*parts}
        if leaving := [part for part in ALL_PARTS if part in self._held and part not in wanted]:
            self.trainer.sleep(leaving)
        if coming := [part for part in ALL_PARTS if part in wanted and part not in self._held]:
            self.trainer.wake(coming)
        self._held = {part for part in ALL_PARTS if part in wanted}

    def close(self) -> None:
        """Release transport and trainer."""
        self._close_transport()
        self.trainer.close()

    def _close_transport(self) -> None:
        self._stream.clear()
        if self._transport is not None:
            self._transport.close()


def consume(units: Iterator[WeightUnit]) -> float:
    """Take part in the collectives of a stream that yields nothing on this rank; return the seconds.

    Raises:
        MilesError: it yields weights, which no engine would receive.
    """
    started = time.perf_counter()
    for unit in units:
        raise MilesError(f"this rank yields {min(unit.tensors)} although its World says that it sends nothing")
    return time.perf_counter() - started
