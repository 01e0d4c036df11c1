"""Placement for ``miles plan --search``: the entry point ``runtime.ray`` of ``miles_planner``."""

from __future__ import annotations

from typing import Any


def place(ranks: int, machine: int, rollout_gpus: int, per_engine: int) -> dict[str, Any] | None:
    """Implements ``miles_planner.layout.RuntimePlanner``: whole machines for a trainer of several, and for an engine of several."""
    each = min(ranks, machine)
    if ranks % each or (per_engine > machine and per_engine % machine) or rollout_gpus % per_engine:
        return None
    return {
        "ray.actor_num_nodes": ranks // each,
        "ray.actor_num_gpus_per_node": each,
        "ray.rollout_num_gpus": rollout_gpus,
        "ray.rollout_num_gpus_per_engine": per_engine,
    }
