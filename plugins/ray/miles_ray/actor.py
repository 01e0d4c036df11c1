"""The process itself."""

from __future__ import annotations

import os
from typing import Any

import ray

from miles_core.backend import EngineWorker, Order, RankWorker, Worker, write_there

KINDS: dict[str, type[Worker]] = {"trainer": RankWorker, "engine": EngineWorker}


class Actor:
    """An actor that holds a worker. Everything that it writes goes to the run's directory."""

    def __init__(self, name: str, directory: str, level: str) -> None:
        write_there(directory, name, level)

    async def make(self, kind: str, order: Order, policy: str) -> None:
        """Make the worker. Not done by the constructor, whose errors Ray reports as deaths."""
        self.worker = KINDS[kind](order, policy)

    async def where(self) -> tuple[str, str, int]:
        """Address and id of the node, and the process's number."""
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), os.getpid()

    async def answer(self, method: str, *args: Any) -> Any:
        """See ``Worker.answer``."""
        return await self.worker.answer(method, *args)
