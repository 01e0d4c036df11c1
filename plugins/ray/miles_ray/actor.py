"""The process itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from miles_core.backend import EngineWorker, Order, RankWorker, Worker, write_there

KINDS: dict[str, type[Worker]] = {"trainer": RankWorker, "engine": EngineWorker}


class Found(NamedTuple):
    """Where an actor is: address and id of its node, the process's number, and the GPUs that Ray gave it."""

    address: str
    node: str
    process: int
    gpus: tuple[str, ...]


class Actor:
    """An actor that holds a worker. Everything that it writes goes to the run's directory."""

    def __init__(self, name: str, directory: str, level: str, devices: Sequence[str] = ()) -> None:
        if devices:  # before anything has asked CUDA for its devices
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        write_there(directory, name, level)

    async def make(self, kind: str, order: Order, policy: str) -> None:
        """Make the worker. Not done by the constructor, whose errors Ray reports as deaths."""
        self.worker = KINDS[kind](order, policy)

    async def where(self) -> Found:
        """Where this process is."""
        here = ray.get_runtime_context()
        gpus = tuple(here.get_accelerator_ids().get("GPU", ()))
        return Found(ray.util.get_node_ip_address(), here.get_node_id(), os.getpid(), gpus)

    async def answer(self, method: str, *args: Any) -> Any:
        """See ``Worker.answer``."""
        return await self.worker.answer(method, *args)
