"""Search for changes that let a rejected run start.

There are few single changes (drop or add a plugin, change an option, switch precision, emulate), so each is tried, and only
changes that the checker accepts are suggested. If no single change keeps the user's plugins and precision, combinations of up to
three option changes are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import Any

from miles_core.nearest import find_nearest
from miles_core.plugin.activate import BACKENDS, SIDES
from miles_core.plugin.check import CheckResult, check
from miles_core.plugin.core import CORE
from miles_core.plugin.facts import Fact, Facts, State, show
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.rule import Compare, RuleError, conjuncts, parse, same

#: Returns error messages for problems of a run that the checker does not cover.
Startable = Callable[[Facts], Iterable[str]]

SHOWN = 6
_TRIES = 400
#: Number of changes after which others are tried.
_LEADING = 3


@dataclass(frozen=True)
class Fix:
    """An accepted change: its text, and the resulting request and facts."""

    text: str
    requested: dict[str, str]
    facts: Facts


@dataclass(frozen=True)
class Change:
    """A change to try: plugins to drop and add, and facts to change. ``keeps``: it keeps the user's plugins and precision."""

    text: str
    drop: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    keeps: bool = False


def find_fixes(
    requested: Sequence[str] | Mapping[str, str],
    manifests: Mapping[str, Plugin],
    facts: Facts,
    rejected: CheckResult,
    drops: int = 2,
    startable: Startable = lambda facts: (),
    follow: int = 2,
) -> list[Fix]:
    """Return up to ``SHOWN`` accepted changes, smallest first.

    Args:
        requested, manifests, facts: the arguments of ``check``.
        rejected: the result of ``check``.
        drops: maximum number of plugins to drop in addition to another change, if nothing smaller helps.
        startable: returns error messages for further problems of a run with these facts.
        follow: number of changes after which others are searched: 1 for those that keep the user's plugins and precision, solve all
            problems and lead to others; 2 to begin with another precision.
    """
    origins = dict(requested) if isinstance(requested, Mapping) else dict.fromkeys(requested, "--plugins")
    before = {p.headline for p in rejected.problems}
    search = _Search(origins, manifests, facts, rejected, startable, before)
    accepted, partial, leading, switching = [], [], [], []
    for change in [
        *_propose_from_problems(rejected),
        *_propose_options(rejected),
        *_propose_plugins(origins, rejected),
        *_propose_precisions(origins, rejected),
    ]:
        fix, left = search.attempt(change)
        if not left:
            accepted.append((change, fix))
        elif left < before and change.keeps:
            partial.append(change)
        elif left.isdisjoint(before) and change.keeps:
            leading.append(change)
        elif change.values and not change.keeps and (left < before or left.isdisjoint(before)):
            switching.append(change)
    if not any(change.keeps for change, _ in accepted):
        combined, others = search.combine(partial)
        accepted, leading = [*combined, *accepted], [*leading, *others]
    found = [fix for _, fix in accepted]
    if follow and not found:  # a change may lead to other problems: sizes that divide, but do not fit
        found = list(search.follow(list({change.text: change for change in leading}.values())[:_LEADING], drops=0))
    if drops and not found:
        dropping = [Change(_describe_drop(name, why), drop=(name,)) for name, why in origins.items()]
        found = list(search.follow(dropping, drops - 1))
    if follow > 1 and not found:  # a format that the GPU does not have, and a model that does not fit
        found = list(search.follow(switching[:_LEADING], drops=0, follow=1))
    return list({fix.text: fix for fix in found}.values())[:SHOWN]


@dataclass(frozen=True)
class _Search:
    """Tries changes of a rejected run, whose problems have the headlines ``before``."""

    origins: dict[str, str]
    manifests: Mapping[str, Plugin]
    facts: Facts
    rejected: CheckResult
    startable: Startable
    before: set[str]

    def attempt(self, change: Change) -> tuple[Fix, set[str]]:
        """Apply a change; returns the changed request and the headlines of the remaining problems, with those that ``startable`` adds
        if the change may be accepted or lead to an accepted one."""
        requested = {name: why for name, why in self.origins.items() if name not in change.drop}
        requested |= {name: "--plugins" for name in change.add if name not in requested}
        changed = []
        for name, value in change.values.items():
            fact = self.rejected.facts.get(name) or self.rejected.facts.lookup(name)
            origin = _format_option(fact.flag, value)
            changed.append(replace(fact, value=value, origin=origin, state=State.KNOWN, chosen=True))
        fix = Fix(change.text, requested, self.facts.with_facts(changed))
        checked = check(fix.requested, self.manifests, fix.facts)
        left = {p.headline for p in checked.problems}
        # other changes are neither accepted nor followed, whatever ``startable`` reports
        counts = left < self.before or left.isdisjoint(self.before)
        return fix, left | set(self.startable(checked.facts) if counts else ())

    def combine(self, partial: list[Change]) -> tuple[list[tuple[Change, Fix]], list[Change]]:
        """Return the accepted combinations of two changes or, if there are none, of three; and those that lead to other problems only."""
        leading = []
        for size in (2, 3):
            accepted = []
            for group in islice(combinations(partial, size), _TRIES):
                values = {name: value for change in group for name, value in change.values.items()}
                if len(values) < sum(len(change.values) for change in group):
                    continue  # two values for one option
                add = tuple(name for change in group for name in change.add)
                change = Change(_join([change.text for change in group]), add=add, values=values, keeps=True)
                fix, left = self.attempt(change)
                if not left:
                    accepted.append((change, fix))
                elif left.isdisjoint(self.before):
                    leading.append(change)
            if accepted:
                break
        return accepted, leading

    def follow(self, changes: Iterable[Change], drops: int, follow: int = 0) -> Iterator[Fix]:
        """Yield accepted changes that begin with one of ``changes``; see ``find_fixes`` for ``drops`` and ``follow``."""
        for change in changes:
            begun, _ = self.attempt(change)
            rejected = check(begun.requested, self.manifests, begun.facts)
            for fix in find_fixes(
                begun.requested, self.manifests, begun.facts, rejected, drops, self.startable, follow
            ):
                if any(fix.facts.value(path) != value for path, value in change.values.items()):
                    continue  # it reverts the first change
                listed = change.drop and fix.text.startswith("--plugins ")
                yield fix if listed else replace(fix, text=_join([change.text, fix.text]))


def _join(texts: Sequence[str]) -> str:
    return (" " if all(text.startswith("--") for text in texts) else ", and ").join(texts)


def _propose_from_problems(rejected: CheckResult) -> Iterator[Change]:
    """Yield the changes that the problems themselves propose (``Problem.tries``), if all their facts exist here."""
    known = dict(rejected.facts)
    for values in (values for problem in rejected.problems for values in problem.tries()):
        if values.keys() <= known.keys():
            values = {name: value for name, value in values.items() if known[name].value != value}
            yield Change(_format_options(values, known), values=values, keeps=True)


def _format_options(values: Mapping[str, Any], known: Mapping[str, Fact]) -> str:
    """Format changed options as typed, after the machines that they need."""
    machines, count = values.get("gpu.machines"), values.get("gpu.count")
    words = [
        _format_option(known[name].flag, value) if known[name].flag else f"--fact {name}={show(value)}"
        for name, value in values.items()
        if name not in ("gpu.machines", "gpu.count")
    ]
    if machines is None and count is None:
        return " ".join(words)
    of = f" with {count} GPUs" if count else ""
    return f"on {machines or 1} machine{'s' * ((machines or 1) > 1)}{of}: {' '.join(words)}"


def _propose_options(rejected: CheckResult) -> Iterator[Change]:
    """Yield other values for each option that a problem names, and emulation."""
    facts = rejected.facts
    for name in dict.fromkeys(name for problem in rejected.problems for name in problem.choices):
        fact = facts.lookup(name)
        if not fact.flag or fact.state is not State.KNOWN or name in SIDES:
            continue
        for value in _values(name, rejected):
            if not same(value, fact.value):
                yield Change(_format_option(fact.flag, value), values={name: value}, keeps=True)
    emulated = facts.lookup("precision.emulated")
    if emulated.value is not True:
        flag = emulated.flag or "--emulate-precision"
        yield Change(flag, values={emulated.name: True}, keeps=True)


def _values(name: str, rejected: CheckResult) -> list[Any]:
    """Return values to try for an option: its choices, the parts of its kind, both booleans, and values in violated rules."""
    fact = rejected.facts.lookup(name)
    values: list[Any] = list(fact.choices)
    if name in BACKENDS:
        values += [n for m in [CORE, *rejected.manifests.values()] for n in m.provides.get(name, {})]
    if isinstance(fact.value, bool):
        values += [True, False]
    for problem in rejected.problems:
        if name in problem.choices and problem.verb == "needs":
            try:
                parts = conjuncts(parse(problem.needs))
            except RuleError:
                continue  # text, not a rule
            for part in parts:
                if isinstance(part, Compare) and part.name == name and part.op in ("==", "in", ">=", "<="):
                    values += part.values
    return list(dict.fromkeys(values))


def _propose_plugins(origins: dict[str, str], rejected: CheckResult) -> Iterator[Change]:
    for name, plugin in rejected.manifests.items():
        if name not in rejected.activation.active and name != "core" and not plugin.standard:
            yield Change(f"add {name} to --plugins", add=(name,), keeps=True)
    for name, why in origins.items():
        if name not in rejected.manifests:
            known = [other for other, plugin in rejected.manifests.items() if not plugin.standard]
            for other in find_nearest(name, known)[:2]:
                yield Change(f"{other} instead of {name} in --plugins", (name,), (other,), keeps=True)
        yield Change(_describe_drop(name, why), drop=(name,))


def _describe_drop(name: str, why: str) -> str:
    return f"drop {name} from --plugins" if why.startswith("--plugins") else f"drop {why}"


def _propose_precisions(origins: dict[str, str], rejected: CheckResult) -> Iterator[Change]:
    """Yield every other precision pair that an installed plugin supports, with the plugins it needs."""
    facts, manifests = rejected.facts, rejected.manifests
    if len(facts.policies) > 1:
        return
    now = tuple(facts.value(side) for side in SIDES)
    cells = [(m, pair) for m in [*manifests.values(), CORE] for pair in m.pairs]
    cells.sort(key=lambda cell: (cell[1].experimental, (cell[1].rollout != now[0]) + (cell[1].train != now[1])))
    for owner, pair in cells:
        if (pair.rollout, pair.train) == now:
            continue
        wanted = [m.name for m in manifests.values() if {pair.rollout, pair.train} & m.formats.keys()]
        if owner.name not in ("core", *wanted):
            wanted.append(owner.name)
        drop = tuple(n for n in origins if n in manifests and manifests[n].formats and n not in wanted)
        plugins = [*(n for n in origins if n not in drop), *(n for n in wanted if n not in origins)]
        flags = [
            _format_option(facts.lookup(side).flag or _flag(side), v)
            for side, v in zip(SIDES, (pair.rollout, pair.train), strict=True)
        ]
        text = " ".join([f"--plugins {','.join(plugins)}"] * bool(plugins) + flags)
        yield Change(text, drop, tuple(wanted), dict(zip(SIDES, (pair.rollout, pair.train), strict=True)))


def _flag(path: str) -> str:
    return "--" + path.replace(".", "-").replace("_", "-")


def _format_option(flag: str, value: Any) -> str:
    """Format an option as typed: ``--flag value``, ``--flag`` or ``--no-flag``."""
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {show(value)}"
