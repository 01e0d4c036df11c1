"""Reaching actors, and replacing them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import exceptions
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from miles_core import MilesError
from miles_ray.actor import BEAT, Actor, Found
from miles_runtime import Order, Workers, last_lines, short_of_memory

#: Calls that an actor works on at a time. A request of a paused engine is one until weights have come: with Ray's thousand,
#: those weights would wait behind requests that wait for them.
CALLS = 1_000_000


@dataclass(frozen=True)
class Place:
    """Where one actor runs and what it takes there: a bundle of a placement group, and resources of it. ``devices`` are the
    numbers of GPUs that it uses without taking them from Ray, because another actor did."""

    group: PlacementGroup
    bundle: int
    resources: Mapping[str, float]
    devices: tuple[str, ...] = ()


class RayWorkers(Workers):
    """Actors of one kind.

    Args:
        kind: ``trainer`` or ``engine``.
        names: one a process.
        places: where each runs.
        order, policy: what each is made from.
        environment: variables that are set before a process starts.
        level: what they log.
        rest: for ``Workers``.
    """

    def __init__(
        self,
        kind: str,
        names: Sequence[str],
        places: Sequence[Place],
        order: Order,
        policy: str,
        environment: Mapping[str, str],
        level: str,
        **rest: Any,
    ) -> None:
        super().__init__(names, trains=kind == "trainer", **rest)
        self.kind, self.places, self.order, self.policy = kind, tuple(places), order, policy
        self.environment, self.level = dict(environment), level
        #: whether Ray can be asked to end processes
        self.reachable = True
        self.actors: list[Any] = [None] * len(names)
        self.found: list[Found | None] = [None] * len(names)

    async def send(self, number: int, method: str, *args: Any) -> Any:
        return await self._answer(number, self.actors[number].answer.remote(method, *args))

    async def renew(self, number: int) -> None:
        await self.kill(number)
        place = self.places[number]
        options: dict[str, Any] = {
            "num_cpus": place.resources.get("CPU", 0),
            "num_gpus": place.resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place.group, place.bundle),
            "max_concurrency": CALLS,
        }
        if self.environment:
            options["runtime_env"] = {"env_vars": self.environment}
        remote: Any = ray.remote  # whose annotations do not know concurrency groups
        actor = remote(concurrency_groups={BEAT: 1})(Actor)
        made = actor.options(**options).remote(self.names[number], self.order.directory, self.level, place.devices)
        self.actors[number] = made
        self.found[number] = await self._answer(number, made.where.remote())
        self.watch(number)
        await self._answer(number, made.make.remote(self.kind, self.order, self.policy))

    async def beat(self, number: int) -> Sequence[str]:
        found: Sequence[str] = await self._answer(number, self.actors[number].beat.remote())
        return found

    async def computes(self, number: int) -> bool:
        found = self.found[number]
        return found is not None and await _on(found, _computes)

    def share(self, value: Any) -> Any:
        # an array is read where it lies by every process of a machine, bytes are copied for each
        return ray.put(np.frombuffer(value, np.uint8) if isinstance(value, bytearray) else value)

    async def host(self) -> str:
        assert self.found[0] is not None
        here = self.found[0].address
        if all(found is not None and found.address == here for found in self.found):
            return "127.0.0.1"  # nothing needs to listen where other machines reach it
        return here

    def devices(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """The numbers of the GPUs that Ray gave these workers."""
        return tuple(gpu for number in numbers if (found := self.found[number]) is not None for gpu in found.gpus)

    def lines(self, number: int) -> tuple[str, ...]:
        return last_lines(self.order.directory, self.names[number])

    async def _answer(self, number: int, answer: Any) -> Any:
        try:
            return await answer
        except exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, MilesError) or short_of_memory(cause):
                raise cause from None
            if isinstance(cause, Exception):
                cause.add_note(f"where it was raised:\n{error.traceback_str}")
                raise cause from None
            raise
        except (exceptions.RayActorError, exceptions.OutOfMemoryError, exceptions.ObjectLostError) as error:
            raise self.lost(number, _cause(error)) from None

    async def kill(self, number: int) -> None:
        actor, self.actors[number] = self.actors[number], None
        if actor is None:
            return
        found, self.found[number] = self.found[number], None
        here = found is not None and found.node == ray.get_runtime_context().get_node_id()
        if found is not None and here:  # a process that is stopped does not hear from Ray that it should end
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.process, signal.SIGKILL)
        if self.reachable:
            ray.kill(actor)
            if found is not None and not here:
                with contextlib.suppress(exceptions.RayError):  # the node is gone, and its processes with it
                    await _on(found, _end)


async def _on(found: Found, function: Any) -> Any:
    """The result of a remote function of a process, run on the process's node."""
    strategy = NodeAffinitySchedulingStrategy(found.node, soft=False)
    return await function.options(scheduling_strategy=strategy).remote(found.process)


@ray.remote(num_cpus=0, max_retries=0)
def _end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@ray.remote(num_cpus=0, max_retries=0)
def _computes(process: int) -> bool:
    """Whether a process uses the processor, or waits for a disk, during a second."""
    before = process_state(process)
    time.sleep(1.0)
    after = process_state(process)
    if before is None or after is None or after[0] in "TtZX":
        return False
    return after[1] > before[1] or after[0] == "D"


def process_state(process: int) -> tuple[str, int] | None:
    """State letter and processor time (clock ticks) of a process of this machine; None when it is not there. Source: proc(5)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[11]) + int(fields[12])


def _cause(error: Exception) -> str:
    """What Ray knows about a death, in a few words."""
    text = str(error)
    if isinstance(error, exceptions.OutOfMemoryError) or "running low on memory" in text:
        return "its machine ran out of memory, and Ray ended it"
    if any(phrase in text for phrase in ("node died", "node has died", "node is dead")):
        return "its machine died or left the cluster"
    return "its process died (a crash, a kill, or the kernel where memory is short)"
