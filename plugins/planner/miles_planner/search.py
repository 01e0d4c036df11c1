"""Searches the layouts of a run: placement, trainer, engines and, if allowed, number formats, ranked by the estimated seconds of a step.

The backends propose layouts that divide and fit (``layout``); this package estimates their times, and asks the plan's own checker about the
fastest. Every result is therefore a run that ``miles plan`` accepts. Options that the user sets are kept if this leaves a choice: a
complete command line sets every part of its layout, and the search then proposes which of these options to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from miles_core.plugin import ConfigError
from miles_core.plugin.check import check
from miles_embedded import engines_gpus
from miles_planner.layout import engine_planner, trainer_planner
from miles_planner.model_cost import ModelCost, model_cost
from miles_planner.placements import finer_placements, placements
from miles_planner.rates import Rates, rates_of
from miles_planner.rollout_time import rollout_time
from miles_planner.sides import FORMATS, SMALLER, Found, Sides, combinations, formats
from miles_planner.step_time import step_time
from miles_planner.task import Task, change_facts, relax
from miles_planner.training_time import training_time

#: Most combinations that the plan checks: of a placement, a pair of formats, and in all.
_CHECKED, _CHECKED_IN_ALL = 8, 60
#: A layout that changes what the user set takes at most this fraction of the seconds of one that does not.
_FASTER = 0.99
#: Options that a search never changes if the user sets them.
_KEPT = ("colocate", "schedule", "rollout.precision", "train.precision", "transport")


@dataclass(frozen=True)
class Own:
    """The run as typed.

    Attributes:
        found: its layout and time; None if a backend cannot read a layout from its options.
        refused: why the plan refuses it; empty if it is accepted.
    """

    found: Found | None
    refused: str


@dataclass(frozen=True)
class Result:
    """What a search found.

    Attributes:
        best: the fastest accepted layouts, fastest first.
        trainers, engines: number of layouts that divide and fit, over all placements and formats.
        refused: problem -> number of fast combinations that the plan refused for it.
        misfits: why no layout of a side fits; empty if some do.
        own: the run as typed.
        one_process: if no layout is accepted, commands of accepted runs in one process.
        relaxed: options that the user set and that the layouts of ``best`` may change: nothing faster, or nothing at all, keeps them.
    """

    best: tuple[Found, ...]
    trainers: int
    engines: int
    refused: Mapping[str, int]
    misfits: tuple[str, ...]
    own: Own
    relaxed: tuple[str, ...] = ()
    one_process: tuple[str, ...] = ()


def search(task: Task, count: int) -> Result:
    """Return the fastest accepted layouts, at most ``count``, one for each placement, size of an engine and pair of formats.

    Raises:
        ConfigError: the model or the GPU is unknown, or a backend has no layouts to search.
    """
    cost = model_cost(task.model)
    if cost is None:
        raise ConfigError("--search: config.json lacks the number of layers, heads, or the hidden size")
    rates = rates_of(str(task.facts.value("gpu")), task.machine)
    own = estimate_own(task, cost, rates)
    sides = Sides(task, cost, rates)
    result = _search(task, sides, own, count)
    is_complete = own.found is not None and not own.refused
    if result.best and not is_complete:
        return result
    kept, relaxed = result.best, set[str]()
    while new := {name for side in sides.conflicts.values() for name in side} - set(_KEPT) - relaxed:
        relaxed |= new
        free = replace(task, facts=relax(task.facts, sorted(relaxed)))
        sides = Sides(free, cost, rates)
        other = _search(free, sides, own, count)
        if other.best:
            limit = min((_FASTER * found.time.seconds for found in kept), default=float("inf"))
            best = [*kept, *(found for found in other.best if found.time.seconds < limit)]
            best.sort(key=lambda found: found.time.seconds)
            return replace(other, best=tuple(best[:count]), relaxed=tuple(sorted(relaxed)))
        if not kept:
            result = other  # these reasons hold for any choice of these options
    return result


def estimate_own(task: Task, cost: ModelCost, rates: Rates) -> Own:
    """Estimate the run as typed."""
    facts = task.facts
    problems = check(task.requested, task.manifests, facts).problems
    refused = f"{problems[0].who} {problems[0].verb} {problems[0].needs}" if problems else ""
    t = trainer_planner(str(facts.value("trainer"))).read(facts, task.model)
    colocated, planner = bool(facts.value("colocate")), engine_planner(str(facts.value("engine")))
    gpus = t.ranks if colocated and t is not None else engines_gpus(facts)
    e = planner.read(facts, task.model, gpus)
    if t is None or e is None or not e.count:
        return Own(None, refused)
    generated = rollout_time(rates, cost, e, task.work, facts.value("schedule") == "async")
    trained = training_time(rates, cost, t, task.work, colocated)
    time = step_time(rates, generated, trained, e, task.work, colocated, str(facts.value("transport")))
    return Own(Found(colocated, t, e, time, {}), refused)


def _search(task: Task, sides: Sides, own: Own, count: int) -> Result:
    best: list[Found] = []
    refused: dict[str, int] = {}
    for pairs in (FORMATS, SMALLER) if task.any_precision else (FORMATS,):
        chosen = list(formats(task, pairs))
        every = [*combinations(sides, chosen, placements(task))]
        if apart := [found for found in every if not found.colocated]:
            ranks = min(apart, key=lambda found: found.time.seconds).trainer.ranks
            every += combinations(sides, chosen, finer_placements(task, ranks))
        best = _accept(task, sorted(every, key=lambda found: found.time.seconds), count, refused)
        if best:
            break
    numbers = sides.count(sides.trainers), sides.count(sides.engines)
    return Result(tuple(best), *numbers, refused, () if best else tuple(sides.explain(bool(refused))), own)


def _accept(task: Task, every: Sequence[Found], count: int, refused: dict[str, int]) -> list[Found]:
    """Return the first ``count`` layouts that the plan accepts, one of each kind, fastest first, and count refusals."""
    best: dict[tuple[object, ...], Found] = {}
    checked: dict[tuple[object, ...], int] = {}
    for found in every:
        precisions = (found.engine.precision, found.trainer.precision)
        kind = (found.colocated, *precisions, found.trainer.ranks, found.engine.gpus)
        tries = checked.get(kind, 0)
        if kind in best or tries == _CHECKED or sum(checked.values()) == _CHECKED_IN_ALL:
            continue
        if len(best) == count:
            break
        checked[kind] = tries + 1
        result = check({**task.requested, **found.plugins}, task.manifests, change_facts(task.facts, found.changes))
        if result.problems:
            first = f"{result.problems[0].who} {result.problems[0].verb} {result.problems[0].needs}"
            refused[first] = refused.get(first, 0) + 1
        else:
            best[kind] = found
    return list(best.values())
