"""What a process that trains holds: one rank of a policy's trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from miles_core.contracts.runtime import TrainedTokens
from miles_core.data.world import World
from miles_core.mismatch.parity import check_side, real_layer
from miles_core.precision.quantizer import SideParity
from miles_core.remote.engine_front import EngineFront
from miles_core.remote.worker import Worker
from miles_core.remote.workers import Workers
from miles_core.run.parts import settle
from miles_core.run.rank import Pairs, Rank, Share
from miles_core.sync.precision import make_codec


class RankWorker(Worker):
    """One rank. Takes one call at a time, and most are collectives: every rank gets the same calls in one order."""

    part: Rank

    async def at(self, step: int, method: str, *args: Any) -> Any:
        """``answer``, with the run of this process where the driver's is: ``step`` completed steps."""
        self.run.step = step
        return await self.answer(method, *args)

    def listen(self, host: str, ranks: int, patience: float) -> int:
        """Rank 0 opens the place where all ranks meet, on a port that is free; returns the port."""
        self._store = TCPStore(host, 0, ranks, True, timeout=timedelta(seconds=patience), wait_for_workers=False)
        return int(self._store.port)

    def join(self, host: str, port: int, rank: int, ranks: int, patience: float) -> None:
        """Initialise torch.distributed's default process group: gloo for tensors on a CPU, NCCL for those on a GPU."""
        if rank:
            self._store = TCPStore(host, port, ranks, False, timeout=timedelta(seconds=patience))
        gpu = torch.cuda.is_available() and self.run.config.model.device != "cpu"
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")  # of the GPUs it sees only its own
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=self._store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=patience),
        )

    def build(self) -> tuple[World, dict[str, object]]:
        """Make trainer and learner; where this rank stands, and what it trains (``Trainer.model_facts``)."""
        trainer = self.run.hooks.make("trainer", self.run.config.run.trainer, run=self.run, policy=self.policy)
        self.part = Rank(self.run, self.policy, trainer)
        settle()
        return self.part.world, dict(trainer.model_facts())

    def real_layer(self, precision: str) -> dict[str, np.ndarray]:
        """A piece of the first layer that is quantised in ``precision``, float32; none on a rank that does not export it."""
        found = real_layer(self.part.trainer.units(), make_codec(self.run, self.policy, precision))
        return {name: tensor.float().cpu().numpy() for name, tensor in found.items()}

    def check_parity(self, precision: str, real: Mapping[str, np.ndarray]) -> SideParity:
        """See ``mismatch.parity.check_side``."""
        layer = {name: torch.tensor(values) for name, values in real.items()}
        return check_side(self.run, self.policy, "trainer", precision, self.part.trainer.quantizer, layer)

    def connect(self, engines: Workers, said: Mapping[str, Any]) -> None:
        """Weights go to these engines from now on; ``said`` is what they told about themselves."""
        bucket = self.run.config.run.sync_bucket_size
        self.part.connect(EngineFront(engines, said, bucket, self.part.world))

    def learn(self, share: Share, step: int) -> tuple[Pairs, dict[str, float], list[TrainedTokens]]:
        """(sum, weight) pairs, the seconds of this rank's clock by phase, and what training saw of each sample (nothing on a rank
        that computes no loss)."""
        self.run.clock.metrics()
        pairs = self.part.learn(share, step)
        seconds = self.run.clock.metrics()
        seen = self.part.learner.tokens
        told = [] if any(tokens.log_probs is None for tokens in seen) else seen
        return pairs, {name.removeprefix("time/"): s for name, s in seconds.items() if name != "time/step"}, told

    def reset_optimizer(self) -> None:
        """See ``Trainer.reset_optimizer``."""
        self.part.trainer.reset_optimizer()

    async def close(self) -> None:
        if self.part is not None:
            self.part.close()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        await super().close()
