"""Searches the layouts of a run: placement, trainer, engines and number formats, ranked by the estimated seconds of a step.

The backends propose layouts that divide and fit (``layout``); this module estimates their times, and asks the plan's own checker about the
fastest. So every result is a run that ``miles plan`` accepts. Options that the user sets are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from miles_core.plugin import ConfigError, Facts
from miles_core.plugin.check import check
from miles_core.plugin.memory import USABLE
from miles_planning.layout import (
    Changes,
    EngineLayout,
    TrainerLayout,
    engine_planner,
    runtime_planner,
    trainer_planner,
)
from miles_planning.model_cost import ModelCost, model_cost
from miles_planning.rates import Rates, rates_of
from miles_planning.rollout_time import RolloutTime, rollout_time
from miles_planning.step_time import StepTime, step_time
from miles_planning.training_time import TrainingTime, training_time
from miles_planning.workload import Workload

GB = 1e9
#: Fractions of the machines for the trainer, if engines have GPUs of their own, and the distance of further ones around the best.
_SPLITS, _FINER = (0.25, 0.5, 0.75), 0.125
#: Number formats of engine and trainer to try.
_FORMATS = (("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8"))
#: Formats to try if engines do not fit in any of these.
_SMALLER = (("int4", "bf16"),)
#: Fastest layouts of each side that are combined, and combinations of a placement and pair of formats that the plan checks.
_COMBINED, _CHECKED = 12, 8
#: Bytes that a sleeping process keeps on its GPU: the CUDA context and NCCL's buffers.
_ASLEEP = 2.0 * GB


@dataclass(frozen=True)
class Task:
    """What is searched.

    Attributes:
        facts: all facts of the run as typed, including the hardware and the defaults of active plugins.
        requested: the requested plugins and why, as ``check`` takes them.
        manifests: the installed plugins.
        model: content of ``config.json``.
        work: the work of a step.
    """

    facts: Facts
    requested: Mapping[str, str]
    manifests: Mapping[str, Any]
    model: Mapping[str, Any]
    work: Workload

    @property
    def machine(self) -> int:
        """GPUs per machine."""
        return int(self.facts.value("gpu.count") or 0)

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.machine * int(self.facts.value("gpu.machines") or 1)


@dataclass(frozen=True)
class Found:
    """A layout of the whole run.

    Attributes:
        colocated: engines share the trainer's GPUs.
        trainer, engine: the layouts.
        time: the estimate.
        changes: all options that select it.
    """

    colocated: bool
    trainer: TrainerLayout
    engine: EngineLayout
    time: StepTime
    changes: Changes


@dataclass(frozen=True)
class Result:
    """What a search found.

    Attributes:
        best: the fastest accepted layouts, fastest first.
        trainers, engines: number of layouts that divide and fit, over all placements and formats.
        refused: problem -> number of fast combinations that the plan refused for it.
        misfits: why no layout of a side fits; empty if some do.
    """

    best: tuple[Found, ...]
    trainers: int
    engines: int
    refused: Mapping[str, int]
    misfits: tuple[str, ...] = ()


def search(task: Task, count: int) -> Result:
    """Return the fastest accepted layout of each placement and pair of formats, at most ``count`` in all.

    Raises:
        ConfigError: the model or the GPU is unknown, or a backend has no layouts to search.
    """
    cost = model_cost(task.model)
    if cost is None:
        raise ConfigError("--search: config.json lacks the number of layers, heads, or the hidden size")
    sides = _Sides(task, cost, rates_of(str(task.facts.value("gpu")), task.machine))
    best: list[Found] = []
    refused: dict[str, int] = {}
    for pairs in (_FORMATS, _SMALLER):
        formats = list(_formats(task.facts, pairs))
        every = [*_combinations(sides, formats, _placements(task))]
        every += _combinations(sides, formats, _finer_placements(task, every))
        best = _accept(task, sorted(every, key=lambda found: found.time.seconds), count, refused)
        if best:
            break
    numbers = sides.count(sides.trainers), sides.count(sides.engines)
    return Result(tuple(best), *numbers, refused, () if best else tuple(sides.explain(bool(refused))))


def _accept(task: Task, every: Sequence[Found], count: int, refused: dict[str, int]) -> list[Found]:
    """Return the first ``count`` layouts that the plan accepts, one of each placement and pair of formats, and count refusals."""
    best: dict[tuple[Any, ...], Found] = {}
    checked: dict[tuple[Any, ...], int] = {}
    for found in every:
        kind = (found.colocated, found.engine.precision, found.trainer.precision)
        if kind in best or checked.get(kind) == _CHECKED or len(best) == count:
            continue
        checked[kind] = checked.get(kind, 0) + 1
        result = check(task.requested, task.manifests, change_facts(task.facts, found.changes))
        if result.problems:
            first = f"{result.problems[0].who} {result.problems[0].verb} {result.problems[0].needs}"
            refused[first] = refused.get(first, 0) + 1
        else:
            best[kind] = found
    return list(best.values())


def change_facts(facts: Facts, changes: Changes) -> Facts:
    """Return the facts of the run with other options, as if the user had set them."""
    return facts.with_facts(
        dataclasses.replace(facts.lookup(name), value=value, origin="--search", chosen=True)
        for name, value in changes.items()
    )


class _Sides:
    """The fastest layouts of trainer and engines for their GPUs and formats, each computed once.

    Args:
        task: what is searched.
        cost, rates: costs of the model, rates of the GPU.
    """

    def __init__(self, task: Task, cost: ModelCost, rates: Rates) -> None:
        self.task, self.cost, self.rates = task, cost, rates
        self.memory = float(task.facts.value("gpu.memory_gb") or 0) * GB
        self.trainers: dict[Any, list[tuple[TrainingTime, TrainerLayout]]] = {}
        self.engines: dict[Any, list[tuple[RolloutTime, EngineLayout]]] = {}
        #: Side -> option -> layouts that fit and have another value of it than the user set.
        self.conflicts: dict[str, dict[str, int]] = {"trainer": {}, "engines": {}, "placement": {}}

    @staticmethod
    def count(found: Mapping[Any, Sequence[Any]]) -> int:
        """Number of layouts that divide and fit."""
        return sum(map(len, found.values()))

    def train(self, facts: Facts, ranks: int, colocated: bool) -> list[tuple[TrainingTime, TrainerLayout]]:
        """Return the layouts of the trainer on ``ranks`` GPUs, fastest first."""
        key = (ranks, colocated, facts.value("train.precision"))
        if key not in self.trainers:
            planner = trainer_planner(str(facts.value("trainer")))
            budget = USABLE * self.memory - (_ASLEEP if colocated else 0.0)
            found = [
                (training_time(self.rates, self.cost, t, self.task.work, colocated), t)
                for t in planner.find(facts, self.task.model, ranks, budget)
                if self.keeps("trainer", t.changes)
            ]
            self.trainers[key] = sorted(found, key=lambda pair: pair[0].seconds)
        return self.trainers[key]

    def generate(
        self, facts: Facts, gpus: int, colocated: bool, work: Workload
    ) -> list[tuple[RolloutTime, EngineLayout]]:
        """Return the layouts of engines on ``gpus`` GPUs, fastest first."""
        key = (gpus, colocated, facts.value("rollout.precision"))
        if key not in self.engines:
            planner = engine_planner(str(facts.value("engine")))
            continuous = facts.value("schedule") == "async"
            found = [
                (rollout_time(self.rates, self.cost, e, work, continuous), e)
                for e in planner.find(facts, self.task.model, gpus, self.memory - (_ASLEEP if colocated else 0.0))
                if self.keeps("engines", e.changes)
            ]
            self.engines[key] = sorted(found, key=lambda pair: pair[0].seconds)
        return self.engines[key]

    def keeps(self, side: str, changes: Changes) -> bool:
        """Whether a layout leaves alone what the user set; else counts the options that it would change."""
        changed = _conflicts(self.task.facts, changes)
        for name in changed:
            self.conflicts[side][name] = self.conflicts[side].get(name, 0) + 1
        return not changed

    def explain(self, refused: bool) -> Iterator[str]:
        """Yield why no combination of layouts was found. refused: there were some, but the plan refused them."""
        facts, model, gpus = self.task.facts, self.task.model, self.task.gpus
        trainers, engines = self.count(self.trainers), self.count(self.engines)
        if not trainers:
            why = self._name_conflicts("trainer")
            yield f"trainer: {why or trainer_planner(str(facts.value('trainer'))).explain(facts, model, gpus)}"
        planner = engine_planner(str(facts.value("engine")))
        fitting = {key[2] for key, layouts in self.engines.items() if layouts}
        for formats in _formats(facts, (*_FORMATS[:2], *_SMALLER)):
            changed = change_facts(facts, formats)
            if changed.value("rollout.precision") in fitting or (trainers and engines):
                continue
            why = self._name_conflicts("engines") or planner.explain(changed, model, gpus)
            yield f"engines in {changed.value('rollout.precision')}: {why}"
        if trainers and engines and not refused:
            conflicts = self._name_conflicts("placement")
            places = [
                sorted({key[0] for key, layouts in side.items() if layouts}) for side in (self.trainers, self.engines)
            ]
            both = f"the trainer fits on {_list(places[0])} and the engines on {_list(places[1])} of {gpus} GPUs, but no placement suits both"
            yield f"placement: {conflicts or both}"

    def _name_conflicts(self, side: str) -> str:
        """Return which options exclude all layouts that fit; empty if there is no such option."""
        facts, counted = self.task.facts, self.conflicts[side]
        found = [facts.lookup(name) for name in sorted(counted, key=lambda name: -counted[name])]
        flags = [f"{fact.flag} {fact.value}" for fact in found if fact.flag]
        if not flags:
            return ""
        what = "combinations" if side == "placement" else "layouts"
        return f"{max(counted.values()):,} {what} fit, but none has {'all of ' * (len(flags) > 1)}{', '.join(flags)}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _combinations(
    sides: _Sides, pairs: Sequence[dict[str, Any]], placements: Sequence[tuple[bool, int]]
) -> Iterator[Found]:
    """Yield the fastest trainers with the fastest engines, for each placement and pair of formats."""
    task = sides.task
    placement = runtime_planner(str(task.facts.value("runtime")))
    for formats in pairs:
        for colocated, ranks in placements:
            changes: dict[str, Any] = {**formats}
            if colocated != bool(task.facts.value("colocate")):
                changes["colocate"] = colocated
            work = task.work
            if not colocated and not task.facts.lookup("schedule").chosen:
                changes["schedule"], work = "ahead", dataclasses.replace(work, lag=1)
            facts = change_facts(task.facts, changes)
            gpus = ranks if colocated else task.gpus - ranks
            engines = sides.generate(facts, gpus, colocated, work)[:_COMBINED]
            trainers = _select_trainers(sides.train(facts, ranks, colocated), engines, sides.memory, colocated)
            for generated, e in engines:
                placed = placement.place(ranks, task.machine, gpus, e.gpus)
                if placed is None or not sides.keeps("placement", placed):
                    continue
                room = USABLE * sides.memory - _held_during_sync(e)
                for trained, t in trainers:
                    if colocated and _held_during_sync(t) > room:
                        continue
                    time = step_time(sides.rates, generated, trained, e, work, colocated, str(facts.value("transport")))
                    yield Found(colocated, t, e, time, {**changes, **placed, **t.changes, **e.changes})


def _select_trainers(
    trainers: Sequence[tuple[TrainingTime, TrainerLayout]],
    engines: Sequence[tuple[RolloutTime, EngineLayout]],
    memory: float,
    colocated: bool,
) -> list[tuple[TrainingTime, TrainerLayout]]:
    """Return the fastest layouts of the trainer; on the engines' GPUs, those whose weights fit next to the engines' during a weight sync."""
    if not colocated or not engines:
        return list(trainers[:_COMBINED])
    room = USABLE * memory - min(_held_during_sync(e) for _, e in engines)
    return list(islice((pair for pair in trainers if _held_during_sync(pair[1]) <= room), _COMBINED))


def _held_during_sync(layout: TrainerLayout | EngineLayout) -> float:
    """Return the most bytes that a process of a layout keeps on its GPU during a weight sync."""
    return max((usage.during_sync().parts.total for usage in layout.estimate()), default=0.0)


def _conflicts(facts: Facts, changes: Changes) -> list[str]:
    """Return the names of options that the user set to another value than the changes."""
    return [
        name
        for name, value in changes.items()
        if name in facts and facts.lookup(name).chosen and facts.value(name) != value
    ]


def _formats(facts: Facts, pairs: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the number formats to try: those that the user set, else the pairs, of which older GPUs compute the first only."""
    sides = ("rollout.precision", "train.precision")
    known = int(facts.value("gpu.sm") or 0) >= 89
    seen = set()
    for pair in pairs if known else pairs[:1]:
        changes = {
            side: name
            for side, name in zip(sides, pair, strict=True)
            if not facts.lookup(side).chosen and facts.value(side) != name
        }
        if tuple(changes.items()) not in seen:
            seen.add(tuple(changes.items()))
            yield changes


def _placements(task: Task) -> list[tuple[bool, int]]:
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
        return any(placed is not None and not _conflicts(task.facts, placed) for placed in ways)

    shares = {_share(task, share) for share in _SPLITS}
    found = [ranks for ranks in sorted(shares) if ranks < task.gpus and allowed(ranks)]
    return found or [ranks for ranks in range(unit, task.gpus, unit) if allowed(ranks)]


def _finer_placements(task: Task, every: Sequence[Found]) -> list[tuple[bool, int]]:
    """Return placements around the best one with engines on their own GPUs."""
    apart = [found for found in every if not found.colocated]
    if not apart:
        return []
    ranks = min(apart, key=lambda found: found.time.seconds).trainer.ranks
    shares = {_share(task, ranks / task.gpus + step) for step in (-_FINER, _FINER)}
    return [(False, finer) for finer in sorted(shares - {ranks for _, ranks in _placements(task)}) if finer < task.gpus]


def _share(task: Task, share: float) -> int:
    """Return this share of the GPUs in whole machines, or in GPUs of a single machine."""
    unit = _unit(task)
    return max(round(share * task.gpus / unit), 1) * unit


def _unit(task: Task) -> int:
    """Return the GPUs by which placements differ: those of a machine, or one on a single machine."""
    return task.machine if task.gpus > task.machine else 1
