"""Placements to try: engines on the trainer's GPUs or on separate GPUs, and the numbers of GPUs."""

from __future__ import annotations

from miles_planner.layout import runtime_planner
from miles_planner.task import Task, conflicts

#: Fractions of the machines for the trainer, if engines have GPUs of their own, and the distance of further ones around the best.
_SPLITS, _FINER = (0.25, 0.5, 0.75), 0.125


def placements(task: Task) -> list[tuple[bool, int]]:
    """Return (colocated, ranks of the trainer) for each placement to try."""
    given, schedule = task.facts.lookup("colocate"), task.facts.value("schedule")
    found = [(True, task.gpus)] if (given.value if given.chosen else schedule == "sync") else []
    if not given.chosen or not given.value:
        found += [(False, ranks) for ranks in _splits(task)]
    return found


def _splits(task: Task) -> list[int]:
    """Return the ranks of the trainer to try with engines on the other GPUs: shares of all, or what the options allow."""
    placement, unit = runtime_planner(str(task.facts.value("runtime"))), _unit(task)

    def allowed(ranks: int) -> bool:
        gpus = task.gpus - ranks
        ways = (placement.place(ranks, task.machine, gpus, each) for each in range(1, gpus + 1) if not gpus % each)
        return any(placed is not None and not conflicts(task.facts, placed) for placed in ways)

    shares = {_share(task, share) for share in _SPLITS}
    found = [ranks for ranks in sorted(shares) if ranks < task.gpus and allowed(ranks)]
    return found or [ranks for ranks in range(unit, task.gpus, unit) if allowed(ranks)]


def finer_placements(task: Task, ranks: int) -> list[tuple[bool, int]]:
    """Return placements around one with engines on their own GPUs. ranks: GPUs of its trainer."""
    shares = {_share(task, ranks / task.gpus + step) for step in (-_FINER, _FINER)}
    return [(False, finer) for finer in sorted(shares - {ranks for _, ranks in placements(task)}) if finer < task.gpus]


def _share(task: Task, share: float) -> int:
    """Return this share of the GPUs in whole machines, or in GPUs of a single machine."""
    unit = _unit(task)
    return max(round(share * task.gpus / unit), 1) * unit


def _unit(task: Task) -> int:
    """Return the GPUs by which placements differ: those of a machine, or one on a single machine."""
    return task.machine if task.gpus > task.machine else 1
