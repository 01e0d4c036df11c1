"""The worker of a training process: holds one rank of a policy's trainer."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from miles_core.contracts.transport import SyncReport
from miles_core.data.world import ALONE, World
from miles_core.mismatch.parity import check_side, real_layer
from miles_core.precision.quantizer import SideParity
from miles_core.run.parts import freeze_gc
from miles_core.sync.push import make_codec
from miles_core.train.data_shard import DataShard, Pairs
from miles_core.train.rank import Rank
from miles_workers.engine_pool import EnginePool
from miles_workers.object_ref import ObjectRef
from miles_workers.remote_tokens import pack_tokens
from miles_workers.worker import Worker, WorkerSpec
from miles_workers.workers import Workers


class RankWorker(Worker):
    """One rank. Executes one call at a time. Most calls are collectives: every rank receives the same calls in the same order.

    - consumes: calls of ``LearnerGroup``, with samples or references to samples that rollout workers produced.
    - waits: in a collective for the other ranks; in ``push`` until all engines have the weights of all ranks.
    - unblocks: the driver's ``learn`` and ``push``, when the last rank has answered.
    """

    part: Rank

    def __init__(self, spec: WorkerSpec, policy: str) -> None:
        super().__init__(spec, policy)
        self._turn = asyncio.Lock()
        self._engines: EnginePool | None = None

    async def at(self, step: int, method: str, *args: Any) -> tuple[Any, dict[str, float]]:
        """Set the run's step to the driver's ``step`` and call ``answer``; return its result and this rank's seconds by phase."""
        async with self._turn:  # a call that the driver abandoned may still be running
            self.run.step = step
            self.run.clock.metrics()
            found = await self.answer(method, *args)
            seconds = self.run.clock.metrics()
        return found, {name.removeprefix("time/"): s for name, s in seconds.items() if name != "time/step"}

    async def learn_stored(
        self, step: int, shard: DataShard, number: int
    ) -> tuple[tuple[tuple[Pairs, int], dict[str, float]], list[ObjectRef]]:
        """Call ``Rank.learn`` as ``at`` does; return the number of samples with recorded values instead of the values, and the values in
        a reference."""
        (pairs, seen), seconds = await self.at(step, "learn", shard, number)
        return ((pairs, len(seen)), seconds), [pack_tokens(seen)] if seen else []

    def connect_engines(self, engines: Workers, build_info: Mapping[str, Any], senders: Sequence[int]) -> None:
        """Send weights to the engines of these processes from now on.

        Args:
            engines: the workers that hold the engines.
            build_info: their result of ``EngineWorker.build``.
            senders: ranks that send weights.
        """
        rank = self.part.world.rank
        world = World(senders.index(rank), len(senders)) if rank in senders else ALONE
        self._engines = EnginePool(engines, build_info, self.run.config.run.sync_bucket_size, world)
        self.part.connect(self._engines, world)

    async def push(self, version: int, plain: bool, number: int) -> SyncReport:
        """See ``Rank.push``; ``number`` is the push's number, which the driver assigned."""
        self._number(number)
        return await self.part.push(version, plain)

    async def stage(self, version: int | None, number: int) -> None:
        """See ``Rank.stage``; ``number`` as for ``push``."""
        self._number(number)
        await self.part.stage(version)

    def _number(self, push: int) -> None:
        if self._engines is not None:
            self._engines.push = push

    def beat(self) -> tuple[str, ...]:
        """Return the names of the engines that have not responded to this rank yet."""
        engines = None if self._engines is None else self._engines.engines
        return () if engines is None else tuple(name for name in engines.names if engines.busy.open(name))

    def listen(self, host: str, ranks: int, timeout: float) -> int:
        """Open the rendezvous store of all ranks on a free port of this address only; called on rank 0. Returns the port."""
        place = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = int(place.getsockname()[1])
        self._store = TCPStore(
            host,
            port,
            ranks,
            True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=place.detach(),  # by default the store listens on every interface
        )
        return port

    def join(self, host: str, port: int, rank: int, ranks: int, timeout: float) -> None:
        """Initialise torch.distributed's default process group: gloo for tensors on a CPU, NCCL for those on a GPU."""
        if rank:
            self._store = TCPStore(host, port, ranks, False, timeout=timedelta(seconds=timeout))
        gpu = torch.cuda.is_available() and self.run.config.model.device != "cpu"
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")  # each process sees only its own GPU
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=self._store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )

    def build(self) -> tuple[World, dict[str, object]]:
        """Create trainer and learner; return this rank's position and the facts of its model (``Trainer.model_facts``)."""
        trainer = self.run.hooks.make("trainer", self.run.config.run.trainer, run=self.run, policy=self.policy)
        self.part = Rank(self.run, self.policy, trainer)
        freeze_gc()
        return self.part.world, dict(trainer.model_facts())

    def real_layer(self, precision: str) -> dict[str, np.ndarray]:
        """Return a slice of the first layer that ``precision`` quantises, float32; empty on a rank that does not export it."""
        found = real_layer(self.part.trainer.units(), make_codec(self.run, self.policy, precision))
        return {name: tensor.float().cpu().numpy() for name, tensor in found.items()}

    def check_parity(self, precision: str, real: Mapping[str, np.ndarray]) -> SideParity:
        """See ``mismatch.parity.check_side``."""
        layer = {name: torch.tensor(values) for name, values in real.items()}
        return check_side(self.run, self.policy, "trainer", precision, self.part.trainer.quantizer, layer)

    async def close(self) -> None:
        if self.part is not None:
            self.part.close()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        await super().close()
