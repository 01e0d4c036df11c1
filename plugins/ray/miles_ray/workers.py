"""Calls actors, and replaces them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import exceptions
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from miles_core.plugin import ConfigError, MilesError, WorkerLost
from miles_ray.actor import BEAT, Actor, Found
from miles_ray.stored import StoredRefs
from miles_ray.watch import raylet_lives
from miles_workers import Stored, Workers, WorkerSpec, last_lines, short_of_memory, uses_cpu

#: Maximum concurrent calls of an actor. Requests to a paused engine stay open until new weights arrive; with Ray's default of 1000, the
#: call that sends the weights could queue behind them and deadlock.
CALLS = 1_000_000
#: Seconds to wait for a machine with room if the one of a lost worker left the cluster.
REPLACING = 300.0
#: Calls to the actors of an engine on all its machines; all others go to the first.
_FOR_ALL_PARTS = frozenset({"build", "close"})


@dataclass(frozen=True)
class Place:
    """Placement of one actor: a bundle of a placement group and its resources.

    Attributes:
        group: the placement group; None for a process that may run on any machine and reserves nothing.
        devices: indices of GPUs that the actor shares with another actor to which Ray assigned them.
        parts: for an engine on several machines, the places of its actors on the other machines.
    """

    group: PlacementGroup | None
    bundle: int
    resources: Mapping[str, float]
    devices: tuple[str, ...] = ()
    parts: tuple[Place, ...] = ()


class RayWorkers(Workers):
    """Actors of one kind.

    An engine on several machines is one worker with an actor on each of them (``Place.parts``). The first actor receives all calls; the
    others are built and closed with it. If one of them is lost, the worker is lost and all its actors are replaced.

    Args:
        kind: ``trainer``, ``engine`` or ``rollout``.
        names: name of each process.
        places: placement of each process.
        spec, policy: passed to each worker.
        environment: variables that are set before a process starts.
        level: log level.
        rest: arguments of ``Workers``.
    """

    def __init__(
        self,
        kind: str,
        names: Sequence[str],
        places: Sequence[Place],
        spec: WorkerSpec,
        policy: str,
        environment: Mapping[str, str],
        level: str,
        **rest: Any,
    ) -> None:
        super().__init__(names, trains=kind == "trainer", **rest)
        self.kind, self.places, self.spec, self.policy = kind, tuple(places), spec, policy
        self.environment, self.level = dict(environment), level
        #: whether Ray can still kill processes
        self.reachable = True
        self.actors: list[Any] = [None] * len(names)
        self.found: list[Found | None] = [None] * len(names)
        #: actors on further machines, with their locations
        self.parts: list[list[tuple[Any, Found]]] = [[] for _ in names]

    async def send(self, number: int, method: str, *args: Any) -> Any:
        first = self.actors[number].answer.remote(method, *args)
        if method not in _FOR_ALL_PARTS or not self.parts[number]:
            return await self._answer(number, first)
        others = [actor.answer.remote(method, *args) for actor, _ in self.parts[number]]
        return (await asyncio.gather(*(self._answer(number, answer) for answer in (first, *others))))[0]

    async def send_stored(self, number: int, method: str, *args: Any) -> tuple[Any, Sequence[Stored]]:
        call = self.actors[number].answer.options(num_returns=2)
        value, refs = call.remote(method, *args)  # results belong to the caller, so they survive the actor
        return await self._answer(number, value), StoredRefs(refs)

    async def restart(self, number: int) -> None:
        await self.kill(number)
        place, name = self.places[number], self.names[number]
        made, self.found[number] = await self._make(number, place, name)
        self.actors[number] = made
        self.watch(number)
        actors = [made]
        for index, other in enumerate(place.parts, 1):
            part = await self._make(number, other, f"{name}-part-{index}")
            self.parts[number].append(part)
            actors.append(part[0])
        await asyncio.gather(
            *(self._answer(number, actor.make.remote(self.kind, self.spec, self.policy)) for actor in actors)
        )
        if place.parts:
            address = await self._answer(number, made.free_address.remote())
            spans = [actor.answer.remote("span", len(actors), i, address) for i, actor in enumerate(actors)]
            await asyncio.gather(*(self._answer(number, answer) for answer in spans))

    async def _make(self, number: int, place: Place, name: str) -> tuple[Any, Found]:
        """Create an actor; return it with its location."""
        group = place.group
        options: dict[str, Any] = {
            "num_cpus": place.resources.get("CPU", 0),
            "num_gpus": place.resources.get("GPU", 0),
            "scheduling_strategy": "SPREAD" if group is None else PlacementGroupSchedulingStrategy(group, place.bundle),
            "max_concurrency": CALLS,
        }
        if self.environment:
            options["runtime_env"] = {"env_vars": self.environment}
        remote: Any = ray.remote  # its annotations lack concurrency groups
        actor = remote(concurrency_groups={BEAT: 1})(Actor)
        made = actor.options(**options).remote(name, self.spec.directory, self.level, place.devices)
        return made, await self._await_location(number, made.where.remote(), group)

    async def _await_location(self, number: int, answer: Any, group: PlacementGroup | None) -> Any:
        """Await the location of a new actor.

        Raises:
            ConfigError: the machine of its placement group left, and for ``REPLACING`` seconds no other had room.
        """
        task = asyncio.ensure_future(self._answer(number, answer))
        try:
            while not (await asyncio.wait({task}, timeout=REPLACING))[0]:
                if group is not None and placement_group_table(group)["state"] == "RESCHEDULING":
                    raise ConfigError(
                        f"its machine left the cluster, and for {REPLACING:g} s none of the others ({_describe_others()}) had room for "
                        f"{_describe(group.bundle_specs[0])} more; start Ray on another machine and resume the run"
                    )
            return await task
        finally:
            task.cancel()

    async def beat(self, number: int) -> Sequence[str]:
        parts = [actor.beat.remote() for actor, _ in self.parts[number]]
        found: Sequence[str] = await self._answer(number, self.actors[number].beat.remote())
        try:
            await asyncio.gather(*(self._answer(number, answer) for answer in parts))
        except WorkerLost as lost:  # the first part does not detect the loss and would wait
            await self.declare_lost(number, f"a part of it on another machine was lost: {lost.cause}")
            raise
        return found

    async def computes(self, number: int) -> bool:
        found = [self.found[number], *(place for _, place in self.parts[number])]
        return all([place is not None and await _computes(place) for place in found])

    def share(self, value: Any) -> Any:
        if not raylet_lives():
            return value  # the run is about to end; ray.put would exit this process without a message
        return ray.put(value)  # processes on one machine read an array in place

    async def host(self) -> str:
        assert self.found[0] is not None
        here = self.found[0].address
        if all(found is not None and found.address == here for found in self.found):
            return "127.0.0.1"  # all on this machine: no need to listen on an external address
        return here

    def devices(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Return the indices of the GPUs that Ray assigned to these workers."""
        return tuple(gpu for number in numbers if (found := self.found[number]) is not None for gpu in found.gpus)

    def lines(self, number: int) -> tuple[str, ...]:
        return last_lines(self.spec.directory, self.names[number])

    async def _answer(self, number: int, answer: Any) -> Any:
        try:
            return await answer
        except exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, MilesError) or short_of_memory(cause):
                raise cause from None
            if isinstance(cause, Exception):
                cause.add_note(f"where it was raised:\n{error}")
                raise cause from None
            raise
        except (exceptions.RayActorError, exceptions.OutOfMemoryError, exceptions.ObjectLostError) as error:
            raise self.lost_error(number, _cause(error)) from None

    async def kill(self, number: int) -> None:
        actor, self.actors[number] = self.actors[number], None
        found, self.found[number] = self.found[number], None
        parts, self.parts[number] = self.parts[number], []
        for one, place in [(actor, found), *parts]:
            if one is not None:
                await self._kill(one, place)

    async def _kill(self, actor: Any, found: Found | None) -> None:
        """Kill the process of an actor in whatever state it is."""
        here = found is not None and found.node == ray.get_runtime_context().get_node_id()
        if found is not None and here:  # a stopped (SIGSTOP) process does not react to Ray's request to end
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.process, signal.SIGKILL)
        if self.reachable:
            ray.kill(actor)
            if found is not None and not here:
                with contextlib.suppress(exceptions.RayError):  # the node is gone with its processes
                    await _on(found, _end)


def _describe(resources: Mapping[str, float]) -> str:
    """Return the number of GPUs, or without GPUs of CPUs, for messages."""
    unit = "GPU" if resources.get("GPU") else "CPU"
    count = resources.get(unit, 0.0)
    return f"{count:g} {unit}{'s' * (count != 1)}"


def _describe_others() -> str:
    """Return what each machine of the cluster has that can compute."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return ", ".join(_describe(one) for one in machines if one.get("GPU") or one.get("CPU")) or "nothing"


async def _on(found: Found, function: Any) -> Any:
    """Run a remote function of a process id on the process's node and return its result."""
    strategy = NodeAffinitySchedulingStrategy(found.node, soft=False)
    return await function.options(scheduling_strategy=strategy).remote(found.process)


@ray.remote(num_cpus=0, max_retries=0)
def _end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


async def _computes(found: Found) -> bool:
    """Whether a process computes; for a process on this machine without Ray, which would start another process first."""
    if found.node == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(uses_cpu, found.process)
    return bool(await _on(found, _computes_there))


@ray.remote(num_cpus=0, max_retries=0)
def _computes_there(process: int) -> bool:
    return uses_cpu(process)


def _cause(error: Exception) -> str:
    """Return a short description of why a process died."""
    text = str(error)
    if isinstance(error, exceptions.OutOfMemoryError) or "running low on memory" in text:
        return "its machine ran out of memory, and Ray ended it"
    if any(phrase in text for phrase in ("node died", "node has died", "node is dead")):
        return "its machine died or left the cluster"
    return "its process died (a crash, a kill, or the kernel where memory is short)"
