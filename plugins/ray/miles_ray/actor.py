"""The Ray actor that runs a worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import sys
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

import ray

from miles_core.plugin import MilesError
from miles_workers import EngineWorker, RankWorker, RolloutWorker, Worker, WorkerSpec, write_there

#: Thread switch interval in seconds; Python's default of 5 ms would delay every incoming call.
SWITCH = 0.0005
KINDS: dict[str, type[Worker]] = {"trainer": RankWorker, "engine": EngineWorker, "rollout": RolloutWorker}


class Found(NamedTuple):
    """Location of an actor: address and id of its node, process id, and the GPU indices that Ray assigned."""

    address: str
    node: str
    process: int
    gpus: tuple[str, ...]


#: Successive ports for an engine on several machines: SGLang derives up to 7 from the given one.
PORTS = 16
#: Concurrency group of heartbeats, which Ray runs in a separate event loop and thread.
BEAT = "beat"


class Actor:
    """An actor that runs a worker and writes its output to the run's directory.

    The worker has its own event loop in a separate thread. Ray adds only one or two calls per iteration to an actor's loop, and an iteration
    of an engine is a whole step of its batch; hundreds of requests, and a pause after them, would take as many steps to arrive.
    """

    def __init__(self, name: str, directory: str, level: str, devices: Sequence[str] = ()) -> None:
        if devices:  # must precede the initialisation of CUDA
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        write_there(directory, name, level)
        sys.setswitchinterval(SWITCH)
        self.worker: Worker | None = None
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="worker", daemon=True).start()

    async def make(self, kind: str, spec: WorkerSpec, policy: str) -> None:
        """Create the worker. The constructor does not do it, because Ray reports errors in constructors as deaths."""

        async def construct() -> Worker:
            return KINDS[kind](spec, policy)

        self.worker = await self._run_in_loop(construct())

    @ray.method(concurrency_group=BEAT)
    async def beat(self) -> tuple[str, ...]:
        """See ``Worker.beat``."""
        return self.worker.beat() if self.worker is not None else ()

    async def where(self) -> Found:
        """Return the location of this process."""
        here = ray.get_runtime_context()
        gpus = tuple(here.get_accelerator_ids().get("GPU", ()))
        return Found(ray.util.get_node_ip_address(), here.get_node_id(), os.getpid(), gpus)

    async def free_address(self) -> str:
        """Return HOST:PORT on this machine where ``PORTS`` successive ports are free."""
        host = ray.util.get_node_ip_address()
        return f"{host}:{_free_ports(host, PORTS)}"

    async def answer(self, method: str, *args: Any) -> Any:
        """See ``Worker.answer``."""
        assert self.worker is not None  # ``make`` is called first
        return await self._run_in_loop(self.worker.answer(method, *args))

    async def _run_in_loop(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the worker's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self.loop))


def _free_ports(host: str, count: int) -> int:
    """Return the first of ``count`` successive free ports. Another process may take one before they are used."""
    for start in random.sample(range(20_000, 60_000, count), 100):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(start, start + count):
                    stack.enter_context(socket.socket()).bind((host, port))
            except OSError:
                continue
            return start
    raise MilesError(f"{host} has no {count} successive free ports between 20000 and 60000")
