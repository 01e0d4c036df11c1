"""The layouts of trainer and engines with their times, and their combinations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from miles_core.plugin import Facts
from miles_core.plugin.memory import USABLE
from miles_planner.layout import (
    Changes,
    EngineLayout,
    TrainerLayout,
    engine_planner,
    runtime_planner,
    trainer_planner,
)
from miles_planner.model_cost import ModelCost
from miles_planner.rates import Rates
from miles_planner.rollout_time import RolloutTime, rollout_time
from miles_planner.step_time import PLAIN, StepTime, step_time
from miles_planner.task import Task, change_facts, conflicts
from miles_planner.training_time import TrainingTime, training_time
from miles_planner.workload import Workload

GB = 1e9
#: Number formats of engine and trainer to try, and those to try if engines do not fit in any of these.
FORMATS, SMALLER = (("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")), (("int4", "bf16"),)
#: Fastest layouts of each side that are combined.
_COMBINED = 12
#: A layout outside these bounds is proposed only if no other one fits: share of a training pass in which the stages of a pipeline wait,
#: layers of a stage, and for a mixture of experts its expert-parallel size, also in comparison with the pipeline's. All trainers of
#: the recipes of ``benchmarks/planning`` with experts stay within the last two.
MOST_BUBBLE, FEWEST_LAYERS, MOST_EXPERT_PARALLEL, MOST_STAGES_PER_EXPERT_RANK = 0.25, 4, 64, 4
#: Bytes that a sleeping process keeps on its GPU: the CUDA context and NCCL's buffers.
_ASLEEP = 2.0 * GB


@dataclass(frozen=True)
class Found:
    """A layout of the whole run.

    Attributes:
        colocated: engines share the trainer's GPUs.
        trainer, engine: the layouts.
        time: the estimate.
        changes: all options that select it.
        plugins: plugins that it needs besides those of the run: plugin -> why.
    """

    colocated: bool
    trainer: TrainerLayout
    engine: EngineLayout
    time: StepTime
    changes: Changes
    plugins: Mapping[str, str] = field(default_factory=dict)


class Sides:
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
        """Return the layouts of the trainer on ``ranks`` GPUs, fastest first, without those whose pipeline mostly waits if others fit."""
        key = (ranks, colocated, facts.value("train.precision"))
        if key not in self.trainers:
            planner = trainer_planner(str(facts.value("trainer")))
            budget = USABLE * self.memory - (_ASLEEP if colocated else 0.0)
            found = [
                (training_time(self.rates, self.cost, t, self.task.work, colocated), t)
                for t in planner.find(facts, self.task.model, ranks, budget)
                if self.keeps("trainer", t.changes)
            ]
            sound = [(time, t) for time, t in found if _is_plausible(time, t, self.cost.moe)]
            self.trainers[key] = sorted(sound or found, key=_rank)
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
        changed = conflicts(self.task.facts, changes)
        for name in changed:
            self.conflicts[side][name] = self.conflicts[side].get(name, 0) + 1
        return not changed

    def explain(self, refused: bool) -> Iterator[str]:
        """Yield why no combination of layouts was found. refused: there were some, but the plan refused them."""
        task = self.task
        facts, model, gpus = task.facts, task.model, task.gpus
        trainers, engines = self.count(self.trainers), self.count(self.engines)
        if not trainers:
            why = self._name_conflicts("trainer")
            yield f"trainer: {why or trainer_planner(str(facts.value('trainer'))).explain(facts, model, gpus)}"
        planner = engine_planner(str(facts.value("engine")))
        fitting = {key[2] for key, layouts in self.engines.items() if layouts}
        for chosen in formats(task, (*FORMATS[:2], *SMALLER)):
            changed = change_facts(facts, chosen)
            if changed.value("rollout.precision") in fitting or (trainers and engines):
                continue
            why = self._name_conflicts("engines") or planner.explain(changed, model, gpus)
            yield f"engines in {changed.value('rollout.precision')}: {why}"
        if trainers and engines and not refused:
            placed = self._name_conflicts("placement")
            places = [
                sorted({key[0] for key, layouts in side.items() if layouts}) for side in (self.trainers, self.engines)
            ]
            both = f"the trainer fits on {_list(places[0])} and the engines on {_list(places[1])} of {gpus} GPUs, but no placement suits both"
            yield f"placement: {placed or both}"
        if not task.any_precision and not engines:
            yield "--allow-precision also tries engines and trainers in other number formats"

    def _name_conflicts(self, side: str) -> str:
        """Return which options exclude all layouts that fit; empty if there is no such option."""
        facts, counted = self.task.facts, self.conflicts[side]
        found = [facts.lookup(name) for name in sorted(counted, key=lambda name: -counted[name])]
        flags = [f"{fact.flag} {fact.value}" for fact in found if fact.flag]
        if not flags:
            return ""
        what = "combinations" if side == "placement" else "layouts"
        return f"{max(counted.values()):,} {what} fit, but none has {'all of ' * (len(flags) > 1)}{', '.join(flags)}"


def _is_plausible(time: TrainingTime, t: TrainerLayout, moe: bool) -> bool:
    """Whether the sizes are within the bounds of runs that are known."""
    staged = t.pp == 1 or (time.bubble <= MOST_BUBBLE and t.stage_layers >= FEWEST_LAYERS)
    return staged and (not moe or (t.ep <= MOST_EXPERT_PARALLEL and t.pp <= max(MOST_STAGES_PER_EXPERT_RANK * t.ep, 1)))


def _rank(pair: tuple[TrainingTime, TrainerLayout]) -> tuple[float, int, int]:
    """Order by seconds; of equally fast layouts, those come first whose experts and pipelines are split less."""
    time, t = pair
    return (float(f"{time.seconds:.2g}"), t.etp if t.ep * t.etp > 1 else 1, t.pp)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def combinations(
    sides: Sides, pairs: Sequence[dict[str, Any]], placements: Sequence[tuple[bool, int]]
) -> Iterator[Found]:
    """Yield the fastest trainers with the fastest engines, for each placement, pair of formats and transport of weights."""
    task, sent = sides.task, transports(sides.task)
    placement = runtime_planner(str(task.facts.value("runtime")))
    for chosen in pairs:
        for colocated, ranks in placements:
            changes: dict[str, Any] = {**chosen}
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
                    for transport, plugins in sent:
                        time = step_time(sides.rates, generated, trained, e, work, colocated, transport)
                        yield Found(colocated, t, e, time, {**changes, **placed, **t.changes, **e.changes}, plugins)


def transports(task: Task) -> list[tuple[str, dict[str, str]]]:
    """Return the transports of weights to try, each with the plugins that it adds: that of the run, and, in place of the plain copy, those
    that an installed plugin provides and selects by itself."""
    transport = task.facts.lookup("transport")
    found: list[tuple[str, dict[str, str]]] = [(str(transport.value), {})]
    if transport.value != PLAIN or transport.chosen:
        return found
    for name, plugin in task.manifests.items():
        chosen = plugin.sets.get(
            "transport"
        )  # a setting with a condition is for runs that the plugin changes otherwise, too
        if isinstance(chosen, str) and chosen in plugin.provides.get("transport", {}):
            found.append((chosen, {name: "--search"}))
    return found


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


def formats(task: Task, pairs: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the number formats to try: those of the run; with ``any_precision`` the pairs, as far as the user set no format and the GPU
    computes it."""
    if not task.any_precision:
        yield {}
        return
    facts, names = task.facts, ("rollout.precision", "train.precision")
    known = int(facts.value("gpu.sm") or 0) >= 89
    seen = set()
    for pair in pairs if known else pairs[:1]:
        changes = {
            side: name
            for side, name in zip(names, pair, strict=True)
            if not facts.lookup(side).chosen and facts.value(side) != name
        }
        if tuple(changes.items()) not in seen:
            seen.add(tuple(changes.items()))
            yield changes
