"""Find conflicts between active plugins: unsupported precision pairs, shared claims, name collisions and cyclic order."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Iterator, Mapping
from itertools import combinations

from miles_core.nearest import did_you_mean
from miles_core.plugin.activate import SIDES, provider
from miles_core.plugin.facts import COMES_WITH, Facts, State
from miles_core.plugin.manifest import Pair, Plugin
from miles_core.plugin.problem import Problem, describe_fact

BASE = "bf16"  # the format every model has


def precision(
    active: Mapping[str, Plugin], manifests: Mapping[str, Plugin], facts: Facts, who: str
) -> tuple[Pair | None, list[Problem], list[str]]:
    """Find the precision pair (rollout x training) of one policy. Pairs that no active plugin declares are unsupported.

    Returns:
        the pair (None if unsupported or unknown), the problems, and the notes.
    """
    sides = [facts.lookup(side) for side in SIDES]
    if any(side.state is not State.KNOWN for side in sides):
        return None, [], []
    rollout, train = (str(side.value) for side in sides)
    problems = []
    for side in sides:
        if side.value != BASE and provider("format", side.value, active) is None:
            known = {BASE, *(name for m in manifests.values() for name in m.formats)}
            hint = did_you_mean(str(side.value), known) or COMES_WITH
            because = f"installed formats are {', '.join(sorted(known))}; {hint}"
            problems.append(
                Problem("this run", f"a number format {side.value!r}", because, (describe_fact(side),), choices=SIDES)
            )
    if problems:
        return None, problems, []
    cells = {(pair.rollout, pair.train): (pair, p.name) for p in active.values() for pair in p.pairs}
    if (rollout, train) not in cells:
        offered = ", ".join(f"{r} x {t} ({name})" for (r, t), (_, name) in sorted(cells.items()))
        values = tuple(describe_fact(side) for side in sides)
        return (
            None,
            [
                Problem(
                    f"{rollout} rollout x {train} train{who}",
                    "by no active plugin",
                    f"the active plugins support (rollout x train) {offered}",
                    values,
                    verb="is supported",
                    choices=SIDES,
                )
            ],
            [],
        )
    pair, owner = cells[rollout, train]
    advice = [f"{rollout} rollout x {train} train{who} is experimental ({owner})"] if pair.experimental else []
    return pair, [], [*advice, *_note_unselected(active, rollout, train, who)]


def _note_unselected(active: Mapping[str, Plugin], rollout: str, train: str, who: str) -> Iterator[str]:
    for plugin in active.values():
        if plugin.formats and not {rollout, train} & plugin.formats.keys():
            name = next(iter(plugin.formats))
            yield (
                f"{plugin.name} is active, but neither side{who} uses its format "
                f"(rollout {rollout}, train {train}): --rollout-precision {name}"
            )


def claims(active: Mapping[str, Plugin], facts: Facts, who: str) -> Iterator[Problem]:
    """Yield a problem for each resource that two plugins claim for one policy.

    With several policies, the claims of a number format count only for policies that select it.
    """
    several = len(facts.policies) > 1
    used = {facts.value(side) for side in SIDES}
    slots: dict[str, list[Plugin]] = {}
    for plugin in active.values():
        if not (several and plugin.formats) or used & plugin.formats.keys():
            for slot in plugin.claims:
                slots.setdefault(slot, []).append(plugin)
    for slot, claimants in slots.items():
        for one, other in combinations(claimants, 2):
            reasons = dict.fromkeys([one.claims[slot], other.claims[slot]])
            yield Problem(f"{one.name} and {other.name}", f"{slot!r}{who}", "; ".join(reasons), verb="both claim")


def collisions(active: Mapping[str, Plugin]) -> Iterator[Problem]:
    """Yield a problem for each field declared differently and each part or format provided twice."""
    fields: dict[str, tuple[str, object]] = {}
    parts: dict[tuple[str, str], str] = {}
    for plugin in active.values():
        for declared in plugin.fields:
            owner, first = fields.setdefault(declared.name, (plugin.name, declared))
            if first != declared:
                values = ((owner, str(first), "its manifest"), (plugin.name, str(declared), "its manifest"))
                because = "a sample has one column per name"
                yield Problem(
                    f"{owner} and {plugin.name}", f"field {declared.name!r} differently", because, values, "declare"
                )
        provided = [(kind, name) for kind, names in plugin.provides.items() for name in names]
        for kind, name in [*provided, *(("format", name) for name in plugin.formats)]:
            owner = parts.setdefault((kind, name), plugin.name)
            if owner != plugin.name:
                because = f"{name!r} would be ambiguous; drop one of the two or rename the part"
                yield Problem(f"{owner} and {plugin.name}", f"the {kind} {name!r}", because, verb="both provide")


def order(active: Mapping[str, Plugin]) -> tuple[tuple[str, ...], list[Problem]]:
    """Return the plugins in plan order, without core, and the problems: ``before`` and ``after``, then order of activation."""
    rank = {name: i for i, name in enumerate(n for n in active if n != "core")}
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for name in rank:
        plugin = active[name]
        sorter.add(name, *(other for other in plugin.after if other in rank))
        for other in plugin.before:
            if other in rank:
                sorter.add(other, name)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        path = " -> ".join(error.args[1])
        because = "their manifests' before and after contradict each other"
        return tuple(rank), [Problem("these plugins", path, because, verb="form a cycle:")]
    placed: list[str] = []
    ready = [(rank[name], name) for name in sorter.get_ready()]
    heapq.heapify(ready)
    while ready:
        _, name = heapq.heappop(ready)
        placed.append(name)
        sorter.done(name)
        for other in sorter.get_ready():
            heapq.heappush(ready, (rank[other], other))
    return tuple(placed), []
