"""The runtime: runs workers as actors in placement groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from miles_core.plugin import ConfigError, Policy, Run
from miles_ray.cluster import Cluster
from miles_ray.watch import RAYLET, first_death
from miles_ray.workers import Place, RayWorkers
from miles_workers import RemoteRuntime, Workers

#: Seconds to wait until the cluster's resources are free.
PLACING = 300.0


class RayRuntime(RemoteRuntime):
    """One actor for each trainer rank and each engine."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.cluster = Cluster(run)
        self.groups: list[PlacementGroup] = []
        #: ranks and engines whose GPUs the policies placed later share
        self._owners: list[tuple[RayWorkers, RayWorkers]] = []
        self._watch: asyncio.Task[None] | None = None

    async def place(self, policy: Policy) -> tuple[Workers, Workers]:
        if self._watch is None:
            self._watch = asyncio.create_task(self._end_without_ray())
        for trainer, engines in self._owners:
            if len(engines) or not policy.generates:
                return await self._place_on(trainer, engines, policy)
        found = await self._place_apart(policy)
        if self.cluster.shared:
            self._owners.append(found)
        return found

    async def _place_on(
        self, trainer: RayWorkers, engines: RayWorkers, policy: Policy
    ) -> tuple[RayWorkers, RayWorkers]:
        """Start the workers of a policy on the devices of another one's."""
        process = {"CPU": 1.0} if self.cluster.unit == "GPU" else {}

        def places(workers: RayWorkers) -> list[Place]:
            found = enumerate(workers.places)
            return [replace(place, resources=process, devices=workers.devices([n])) for n, place in found]

        ranks = await self._start_workers("trainer", places(trainer), policy)
        return ranks, await self._start_workers("engine", places(engines) if policy.generates else [], policy)

    async def _place_apart(self, policy: Policy) -> tuple[RayWorkers, RayWorkers]:
        """Start the workers of a policy on devices of its own."""
        sizes, unit = self.cluster.sizes, self.cluster.unit
        beside = max(sizes.per_node // sizes.per_engine, 1) if sizes.colocate else 0
        trainer = await self._group(
            [self._bundle(sizes.per_node, sizes.per_node + beside)] * sizes.nodes,
            "STRICT_SPREAD",
            f"--actor-num-nodes {sizes.nodes} x --actor-num-gpus-per-node {sizes.per_node}",
        )
        rank = {"CPU": 1.0, unit: 1.0}
        ranks = [Place(trainer, number // sizes.per_node, rank) for number in range(sizes.ranks)]
        if not policy.generates:
            return await self._start_workers("trainer", ranks, policy), await self._start_workers("engine", [], policy)
        if sizes.colocate:  # engines use the GPUs that Ray assigned to the trainer ranks
            started = await self._start_workers("trainer", ranks, policy)
            process = {"CPU": 1.0} if unit == "GPU" else {}
            parts = sizes.parts(sizes.per_node)
            engines = [
                _first_of(
                    Place(trainer, shared[0] // sizes.per_node, process, started.devices(shared))
                    for shared in (sizes.ranks_of(e, part, parts) for part in range(parts))
                )
                for e in range(sizes.engines)
            ]
            return started, await self._start_workers("engine", engines, policy)
        parts = sizes.parts(self.cluster.machine)
        bundle = self._bundle(sizes.per_engine // parts, 1)
        engine = await self._group(
            [bundle] * sizes.engines * parts,
            "PACK",
            f"--rollout-num-gpus {sizes.engines * sizes.per_engine}, {sizes.per_engine} per engine"
            + (f", in {parts} parts" if parts > 1 else ""),
        )
        share = sizes.per_engine // parts
        process = {"CPU": 1.0, "GPU": float(share)} if unit == "GPU" else {"CPU": float(share)}
        engines = [
            _first_of(Place(engine, e * parts + part, process) for part in range(parts)) for e in range(sizes.engines)
        ]
        both = await asyncio.gather(
            self._start_workers("trainer", ranks, policy), self._start_workers("engine", engines, policy)
        )
        return both[0], both[1]

    def place_rollouts(self, names: Sequence[str]) -> Workers:
        """Rollout workers are spread over all machines and reserve no CPU: they mostly wait for engines and tools."""
        return self._workers("rollout", names, [Place(None, 0, {}) for _ in names], self.run.policy)

    def _bundle(self, units: int, processes: int) -> dict[str, float]:
        """Return the resources of ``units`` devices and ``processes`` processes, with one CPU per process on GPU clusters."""
        processes *= self.cluster.policies if self.cluster.shared else 1
        return {"CPU": float(processes), "GPU": float(units)} if self.cluster.unit == "GPU" else {"CPU": float(units)}

    async def _group(self, bundles: list[dict[str, float]], strategy: str, wanted: str) -> PlacementGroup:
        group = placement_group(bundles, strategy)
        self.groups.append(group)
        try:
            async with asyncio.timeout(PLACING):
                await group.ready()
        except TimeoutError:
            nodes = [node["Resources"].get(self.cluster.unit, 0) for node in ray.nodes() if node["Alive"]]
            have = ", ".join(f"{count:g}" for count in nodes if count)
            raise ConfigError(
                f"{self.cluster.name} has no room for {wanted}: its machines have {have} {self.cluster.unit}s in total, but other jobs "
                f"may use them (see ray status); waited {PLACING:g} s"
            ) from None
        return group

    async def _start_workers(self, kind: str, places: list[Place], policy: Policy) -> RayWorkers:
        workers = self._workers(kind, self.names(policy, kind, len(places)), places, policy)
        await self.start(workers)
        return workers

    def _workers(self, kind: str, names: Sequence[str], places: list[Place], policy: Policy) -> RayWorkers:
        run = self.run
        return RayWorkers(
            kind,
            names,
            places,
            self.spec,
            policy.name,
            environment(run),
            run.config.run.log_level,
            timeouts=self.timeouts,
            busy=self.busy,
        )

    async def _end_without_ray(self) -> None:
        """End the run when one of Ray's own processes died, because workers can no longer be replaced.

        Without the raylet, the workers on this machine die too. Without the control store they survive for a while, so the trainer ranks
        keep running to save a checkpoint."""
        dead = await first_death()
        cause = f"{dead} died, and workers cannot be replaced without it"
        self.cluster.lost = cause
        self.restarts.forbid()
        for workers in self._placed:
            workers.reachable = False  # type: ignore[attr-defined]
        gone = [workers for workers in self._placed if dead == RAYLET or not workers.trains]
        await asyncio.gather(*(w.declare_lost(number, cause) for w in gone for number in range(len(w))))

    async def close(self) -> None:
        await super().close()
        if self._watch is not None:
            self._watch.cancel()
        if self.cluster.lost:
            self.cluster.abandon()
            return
        for group in self.groups:
            remove_placement_group(group)
        self.cluster.leave()


def _first_of(places: Iterable[Place]) -> Place:
    """Return the first place of a worker with the others as its further parts."""
    first, *others = places
    return replace(first, parts=tuple(others))


def environment(run: Run) -> dict[str, str]:
    """Return the environment variables that the plan sets; they must be set before a process starts."""
    return {s.path.removeprefix("env."): str(s.value) for s in run.plan.sets if s.path.startswith("env.")}
