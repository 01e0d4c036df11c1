"""What a process that generates holds: one engine, and the weights on their way into it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from miles_core.contracts.engine import Engine
from miles_core.data.unit import Encoded
from miles_core.errors import MilesError
from miles_core.mismatch.parity import check_side
from miles_core.precision.quantizer import SideParity
from miles_core.remote.mailbox import Answers, Inbox, Letters
from miles_core.remote.worker import Order, Worker
from miles_core.run.parts import settle


class EngineWorker(Worker):
    """One engine. Many calls may be in flight.

    Weights arrive from every rank of the trainer in buckets (``take``). When all ranks have said that theirs are complete
    (``update``), the engine gets them in one stream; until then they are held in host memory, beside the engine's own.
    """

    part: Engine

    def __init__(self, order: Order, policy: str) -> None:
        super().__init__(order, policy)
        self._buckets: dict[int, list[bytearray]] = {}
        self._complete: set[int] = set()
        self._served: asyncio.Future[None] | None = None
        self._inbox = Inbox(lambda request: self.part.generate(request))

    async def build(self) -> dict[str, Any]:
        """Make and start the engine; what a front has to know about it."""
        name = self.run.config.run.engine
        self.part = self.run.hooks.make("engine", name, run=self.run, policy=self.policy)
        await self.part.start()
        settle()
        return {
            "capabilities": frozenset(self.part.capabilities),
            "kv_cache_dtype": self.part.kv_cache_dtype,
            "native_products": bool(self.part.native_products),
            "model_facts": dict(self.part.model_facts()),
        }

    def check_parity(self, precision: str, real: Mapping[str, np.ndarray]) -> SideParity:
        """See ``mismatch.parity.check_side``."""
        layer = {name: torch.tensor(values) for name, values in real.items()}
        return check_side(self.run, self.policy, "engine", precision, self.part.quantizer, layer)

    def post(self, letters: Letters) -> None:
        """See ``Inbox.post``."""
        self._inbox.post(letters)

    async def answers(self) -> Answers:
        """See ``Inbox.answers``."""
        return await self._inbox.answers()

    def take(self, rank: int, number: int, bucket: bytearray) -> None:
        """Bucket ``number`` of what a rank sends; the first one replaces all of an earlier push."""
        if number == 0:
            self._buckets[rank] = []
        self._buckets[rank].append(bucket)

    async def update(self, version: int, rank: int, ranks: int) -> None:
        """A rank's buckets are complete; returns when the engine serves those of all ``ranks`` as ``version``."""
        if self._served is None:
            self._served = asyncio.get_running_loop().create_future()
        served = self._served
        self._complete.add(rank)
        if len(self._complete) == ranks:
            try:
                await self.part.update_weights(self._units(), version)
                served.set_result(None)
            except Exception as error:
                served.set_exception(error)
            self._forget()
        await asyncio.shield(served)

    def give_up(self) -> None:
        """Forget what ranks have sent of an update that will not be completed."""
        if self._served is not None:
            self._served.set_exception(MilesError("this update of the weights was given up"))
            self._served.exception()  # where nobody waits nobody is told
        self._forget()

    def _forget(self) -> None:
        self._buckets, self._complete, self._served = {}, set(), None

    def _units(self) -> Iterator[Encoded]:
        for _, buckets in sorted(self._buckets.items()):
            while buckets:
                yield from Encoded.read(buckets.pop(0))

    async def close(self) -> None:
        if self.part is not None:
            await self.part.stop()
        await super().close()
