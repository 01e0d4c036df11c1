"""The process itself."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

import ray

from miles_runtime import EngineWorker, Order, RankWorker, Worker, write_there

#: Seconds after which a thread that computes lets another one run; Python's 5 ms would be added to every call that arrives.
SWITCH = 0.0005
KINDS: dict[str, type[Worker]] = {"trainer": RankWorker, "engine": EngineWorker}


class Found(NamedTuple):
    """Where an actor is: address and id of its node, the process's number, and the GPUs that Ray gave it."""

    address: str
    node: str
    process: int
    gpus: tuple[str, ...]


#: The concurrency group of heartbeats: Ray gives it an event loop and a thread of its own.
BEAT = "beat"


class Actor:
    """An actor that holds a worker. Everything that it writes goes to the run's directory.

    The worker has an event loop of its own, in a thread of its own: Ray hands an actor's loop one or two calls a turn, and a turn of an
    engine is a whole step of its batch, so that hundreds of requests would take as many steps to arrive, and a pause behind them as well.
    """

    def __init__(self, name: str, directory: str, level: str, devices: Sequence[str] = ()) -> None:
        if devices:  # before anything has asked CUDA for its devices
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        write_there(directory, name, level)
        sys.setswitchinterval(SWITCH)
        self.worker: Worker | None = None
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="worker", daemon=True).start()

    async def make(self, kind: str, order: Order, policy: str) -> None:
        """Make the worker. Not done by the constructor, whose errors Ray reports as deaths."""

        async def made() -> Worker:
            return KINDS[kind](order, policy)

        self.worker = await self._there(made())

    @ray.method(concurrency_group=BEAT)
    async def beat(self) -> tuple[str, ...]:
        """See ``Worker.beat``."""
        return self.worker.beat() if self.worker is not None else ()

    async def where(self) -> Found:
        """Where this process is."""
        here = ray.get_runtime_context()
        gpus = tuple(here.get_accelerator_ids().get("GPU", ()))
        return Found(ray.util.get_node_ip_address(), here.get_node_id(), os.getpid(), gpus)

    async def answer(self, method: str, *args: Any) -> Any:
        """See ``Worker.answer``."""
        assert self.worker is not None  # made before anything is asked
        return await self._there(self.worker.answer(method, *args))

    async def _there(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a call in the worker's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self.loop))
