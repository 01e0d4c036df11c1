"""Plan checks of a run with Ray: contradictory numbers, and more devices than available."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from miles_core.plugin import Facts, Problem, Review, describe_fact
from miles_ray.config import RayConfig
from miles_ray.sizes import Sizes

#: Seconds to wait for an answer of a cluster.
PATIENCE = 10.0
START = "start one with: ray start --head"


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """Implements ``miles_core.plugin.Plugin.review``."""
    if facts.value("runtime") != "ray":
        return Review()
    options = RayConfig(**{f.name: facts.value(f"ray.{f.name}") for f in fields(RayConfig)})
    sizes = options.sizes(bool(facts.value("colocate")))
    problems = [*_contradictions(facts, options, sizes)]
    if facts.elsewhere:
        return Review(_describe_idle(facts, sizes), (*problems, *_check_planned_hardware(facts, sizes)))
    address = options.address or os.environ.get("RAY_ADDRESS")
    if address:
        if not answers(address):
            problems.append(_unreachable(facts, address))
    elif not _initialised():
        problems += _this_machine(facts, sizes)
    return Review(problems=tuple(problems))


def _contradictions(facts: Facts, options: RayConfig, sizes: Sizes) -> list[Problem]:
    found = []
    rollout, per_engine = options.rollout_num_gpus, sizes.per_engine
    if rollout is not None and rollout % per_engine:
        found.append(
            _problem(
                facts,
                f"whole engines, and --rollout-num-gpus {rollout} are not a multiple of --rollout-num-gpus-per-engine {per_engine}",
                "an engine runs on all of its GPUs",
                "rollout_num_gpus",
                "rollout_num_gpus_per_engine",
            )
        )
    whole = per_engine % sizes.per_node if per_engine > sizes.per_node else sizes.per_node % per_engine
    if sizes.colocate and (whole or (rollout or 0) > sizes.ranks):
        found.append(
            _problem(
                facts,
                f"with --colocate, engines of {per_engine} GPUs that divide the {sizes.per_node} of a machine or take whole machines, "
                f"{sizes.ranks} GPUs in all",
                "engines take the trainer's GPUs",
                "rollout_num_gpus",
                "rollout_num_gpus_per_engine",
                "actor_num_gpus_per_node",
                tries=_engines_of(options, sizes),
            )
        )
    if sizes.colocate and per_engine > sizes.per_node and not facts.value("engine.has.span"):
        found.append(_cannot_span(facts, sizes.per_node, "ray.actor_num_gpus_per_node"))
    return found


def _cannot_span(facts: Facts, machine: int, origin: str) -> Problem:
    """Report that an engine needs the GPUs of several machines and cannot use them."""
    option = "ray.rollout_num_gpus_per_engine"
    return Problem(
        "ray",
        f"{facts.value(option)} GPUs in one machine",
        f"--engine {facts.value('engine')} runs on one machine; --engine sglang can use several",
        (describe_fact(facts.lookup(option)), describe_fact(facts.lookup(origin))),
        choices=(option,),
        tries=lambda: [{option: machine}],
    )


def _check_planned_hardware(facts: Facts, sizes: Sizes) -> list[Problem]:
    """Check the sizes against the planned hardware instead of this machine."""
    count, machines = facts.value("gpu.count"), facts.value("gpu.machines")
    if not count or facts.value("model.device") == "cpu":
        return []
    found = []
    if sizes.per_node > count:
        option = "ray.actor_num_gpus_per_node"
        found.append(
            Problem(
                "ray",
                f"{sizes.per_node} GPUs in one machine",
                "ranks of a machine are on one machine",
                (describe_fact(facts.lookup(option)), describe_fact(facts.lookup("gpu.count"))),
                choices=(option,),
                tries=lambda: [{option: count}],
            )
        )
    if sizes.per_engine > count and not sizes.colocate and not facts.value("engine.has.span"):
        found.append(_cannot_span(facts, count, "gpu.count"))
    if machines and not found and sizes.devices > machines * count:
        found.append(_too_many(facts, sizes, machines * count, ("gpu.machines", "gpu.count")))
    return found


def _describe_idle(facts: Facts, sizes: Sizes) -> tuple[str, ...]:
    """Return a note if the run leaves GPUs of the planned hardware unused."""
    have = int(facts.value("gpu.machines") or 1) * int(facts.value("gpu.count") or 0)
    used = sizes.devices * (1 if facts.value("ray.share_policy_gpus") else len(facts.policies))
    return (f"the run uses {used} of {have} GPUs",) if 0 < used < have else ()


def _too_many(facts: Facts, sizes: Sizes, have: int, hardware: tuple[str, ...]) -> Problem:
    """Report that a run needs more GPUs than available; proposes fewer for the trainer, or --colocate."""
    engines = "on the same ones" if sizes.colocate else f"and {sizes.engines} x {sizes.per_engine} to generate"
    because = f"the trainer takes {sizes.nodes} x {sizes.per_node} {engines}, and there are {have}"
    names = ("ray.actor_num_nodes", "ray.actor_num_gpus_per_node", "ray.rollout_num_gpus", *hardware)
    values = tuple(describe_fact(facts.lookup(name)) for name in names)
    left = (have - sizes.engines * sizes.per_engine) // sizes.nodes
    tries: list[dict[str, Any]] = [{"colocate": True}]
    tries += [{"ray.actor_num_gpus_per_node": left}] if left > 0 and not sizes.colocate else []
    choices = ("ray.actor_num_gpus_per_node", "ray.rollout_num_gpus")
    return Problem("ray", f"{sizes.devices} GPUs", because, values, choices=choices, tries=lambda: tries)


def _this_machine(facts: Facts, sizes: Sizes) -> list[Problem]:
    """Check the sizes against this machine, the cluster's only node without an address. CPU processes are not limited."""
    found = []
    if sizes.nodes > 1:
        because = (
            f"without --ray-address the cluster has only this machine: {START} on one machine, ray start --address HEAD:6379 on the "
            "others, and give --ray-address"
        )
        found.append(_problem(facts, f"{sizes.nodes} machines", because, "actor_num_nodes"))
    count, device = facts.lookup("gpu.count"), facts.value("model.device")
    if device == "cpu" or count.value is None or (device == "auto" and not count.value):
        return found
    if sizes.devices > count.value:
        found.append(_too_many(facts, sizes, count.value, ("gpu.count",)))
    return found


def _unreachable(facts: Facts, address: str) -> Problem:
    origin = "--ray-address" if facts.value("ray.address") else "RAY_ADDRESS"
    because = f"no process listens at {address} ({origin}): {START}, or leave the address out to start a cluster on this machine"
    return Problem("ray", "a cluster that answers", because, choices=("ray.address",))


def _engines_of(options: RayConfig, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the options for colocated engines of the next smaller and the next larger size that divides the GPUs of a machine."""
    divisors = [n for n in range(1, sizes.per_node + 1) if not sizes.per_node % n]
    near = [*[n for n in divisors if n <= sizes.per_engine][-1:], *[n for n in divisors if n > sizes.per_engine][:1]]
    rollout = {"ray.rollout_num_gpus": sizes.ranks} if options.rollout_num_gpus else {}
    return [{"ray.rollout_num_gpus_per_engine": n, **rollout} for n in near]


def _problem(facts: Facts, needs: str, because: str, *names: str, tries: Sequence[dict[str, Any]] = ()) -> Problem:
    paths = tuple(f"ray.{name}" for name in names)
    values = tuple(describe_fact(facts.lookup(path)) for path in paths)
    return Problem("ray", needs, because, values, choices=paths, tries=lambda: tries)


@lru_cache
def answers(address: str) -> bool:
    """Whether a process listens at HOST:PORT (Ray itself would time out after minutes); True for other forms of addresses."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return True
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


def _initialised() -> bool:
    """Whether this process is already connected to a cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
