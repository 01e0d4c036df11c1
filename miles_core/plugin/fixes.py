"""Changes that would let a refused run start.

The space of single decisions is tiny (drop a plugin, add one, give an option another of its values, switch precision,
emulate), so each is tried and only those the checker accepts are shown: a suggestion never fails next. Where no single
change keeps the user's plugins and precision, up to three changes of options are tried together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import Any

from miles_core.nearest import nearest
from miles_core.plugin.activate import BACKENDS, SIDES
from miles_core.plugin.check import Checked, check
from miles_core.plugin.core import CORE
from miles_core.plugin.facts import Fact, Facts, State, show
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.rule import Compare, RuleError, conjuncts, parse, same

#: What is wrong with a run of these facts beside what the checker sees, one sentence each.
Startable = Callable[[Facts], Iterable[str]]

SHOWN = 6
_TRIES = 400


@dataclass(frozen=True)
class Fix:
    """A change that was accepted: how to type it, and the request and facts it leads to."""

    text: str
    requested: dict[str, str]
    facts: Facts


@dataclass(frozen=True)
class Change:
    """One decision to make otherwise. ``keeps``: the user's plugins and precision stay."""

    text: str
    drop: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    keeps: bool = False


def fixes(
    requested: Sequence[str] | Mapping[str, str],
    manifests: Mapping[str, Plugin],
    facts: Facts,
    refused: Checked,
    drops: int = 2,
    startable: Startable = lambda facts: (),
) -> list[Fix]:
    """At most ``SHOWN`` accepted changes, the smallest first.

    Args:
        requested, manifests, facts: as given to ``check``.
        refused: what ``check`` found.
        drops: how many plugins may be dropped besides another change, when nothing less helps.
        startable: what else is wrong with a run of these facts, one sentence each.
    """
    asked = dict(requested) if isinstance(requested, Mapping) else dict.fromkeys(requested, "--plugins")
    search = _Search(asked, manifests, facts, refused, startable)
    accepted, partial = [], []
    before = {p.headline for p in refused.problems}
    for change in [*_proposed(refused), *_options(refused), *_plugins(asked, refused), *_precisions(asked, refused)]:
        fix, left = search.attempt(change)
        if not left:
            accepted.append((change, fix))
        elif left < before and change.keeps:
            partial.append(change)
    if not any(change.keeps for change, _ in accepted):
        accepted = [*search.together(partial), *accepted]
    unique = {fix.text: fix for _, fix in accepted} or {fix.text: fix for fix in search.without_one(drops)}
    return list(unique.values())[:SHOWN]


@dataclass(frozen=True)
class _Search:
    """A refused run, and changes tried on it."""

    asked: dict[str, str]
    manifests: Mapping[str, Plugin]
    facts: Facts
    refused: Checked
    startable: Startable

    def attempt(self, change: Change) -> tuple[Fix, set[str]]:
        """The changed request and the headlines of the problems it has left."""
        requested = {name: why for name, why in self.asked.items() if name not in change.drop}
        requested |= {name: "--plugins" for name in change.add if name not in requested}
        changed = []
        for name, value in change.values.items():
            fact = self.refused.facts.get(name) or self.refused.facts.lookup(name)
            origin = _typed(fact.flag, value)
            changed.append(replace(fact, value=value, origin=origin, state=State.KNOWN, chosen=True))
        fix = Fix(change.text, requested, self.facts.having(changed))
        checked = check(fix.requested, self.manifests, fix.facts)
        return fix, {p.headline for p in checked.problems} | set(self.startable(checked.facts))

    def together(self, partial: list[Change]) -> list[tuple[Change, Fix]]:
        """The smallest sets of two or three changes that are accepted."""
        for size in (2, 3):
            found = []
            for group in islice(combinations(partial, size), _TRIES):
                values = {name: value for change in group for name, value in change.values.items()}
                if len(values) < sum(len(change.values) for change in group):
                    continue  # two values for one option
                add = tuple(name for change in group for name in change.add)
                texts = [change.text for change in group]
                text = (" " if all(t.startswith("--") for t in texts) else ", and ").join(texts)
                change = Change(text, add=add, values=values, keeps=True)
                fix, left = self.attempt(change)
                if not left:
                    found.append((change, fix))
            if found:
                return found
        return []

    def without_one(self, drops: int) -> list[Fix]:
        """Where nothing else helps: drop one plugin, and then what helps without it."""
        found = []
        for name in self.asked if drops else ():
            rest = {n: why for n, why in self.asked.items() if n != name}
            refused = check(rest, self.manifests, self.facts)
            for fix in fixes(rest, self.manifests, self.facts, refused, drops - 1, self.startable):
                listed = fix.text.startswith("--plugins ")
                found.append(
                    fix if listed else replace(fix, text=f"{_dropped(name, self.asked[name])}, and {fix.text}")
                )
        return found


def _proposed(refused: Checked) -> Iterator[Change]:
    """What the problems themselves propose; an option that is not installed here cannot be changed."""
    known = dict(refused.facts)
    for values in (values for problem in refused.problems for values in problem.tries()):
        if values.keys() <= known.keys():
            values = {name: value for name, value in values.items() if known[name].value != value}
            yield Change(_typed_together(values, known), values=values, keeps=True)


def _typed_together(values: Mapping[str, Any], known: Mapping[str, Fact]) -> str:
    """Options as typed, after the machines that they need."""
    machines, count = values.get("gpu.machines"), values.get("gpu.count")
    words = [
        _typed(known[name].flag, value) if known[name].flag else f"--fact {name}={show(value)}"
        for name, value in values.items()
        if name not in ("gpu.machines", "gpu.count")
    ]
    if machines is None and count is None:
        return " ".join(words)
    of = f" with {count} GPUs" if count else ""
    return f"on {machines or 1} machine{'s' * ((machines or 1) > 1)}{of}: {' '.join(words)}"


def _options(refused: Checked) -> Iterator[Change]:
    """Another value for each option some problem is about, and emulation."""
    facts = refused.facts
    for name in dict.fromkeys(name for problem in refused.problems for name in problem.choices):
        fact = facts.lookup(name)
        if not fact.flag or fact.state is not State.KNOWN or name in SIDES:
            continue
        for value in _values(name, refused):
            if not same(value, fact.value):
                yield Change(_typed(fact.flag, value), values={name: value}, keeps=True)
    emulated = facts.lookup("precision.emulated")
    if emulated.value is not True:
        flag = emulated.flag or "--emulate-precision"
        yield Change(flag, values={emulated.name: True}, keeps=True)


def _values(name: str, refused: Checked) -> list[Any]:
    """What an option may be instead: its choices, the parts of that kind, both truths, or what a broken rule asks
    for."""
    fact = refused.facts.lookup(name)
    values: list[Any] = list(fact.choices)
    if name in BACKENDS:
        values += [n for m in [CORE, *refused.manifests.values()] for n in m.provides.get(name, {})]
    if isinstance(fact.value, bool):
        values += [True, False]
    for problem in refused.problems:
        if name in problem.choices and problem.verb == "needs":
            try:
                parts = conjuncts(parse(problem.needs))
            except RuleError:
                continue  # a sentence, not a rule
            for part in parts:
                if isinstance(part, Compare) and part.name == name and part.op in ("==", "in", ">=", "<="):
                    values += part.values
    return list(dict.fromkeys(values))


def _plugins(asked: dict[str, str], refused: Checked) -> Iterator[Change]:
    for name in refused.manifests:
        if name not in refused.activation.active and name != "core":
            yield Change(f"add {name} to --plugins", add=(name,), keeps=True)
    for name, why in asked.items():
        if name not in refused.manifests:
            for other in nearest(name, refused.manifests)[:2]:
                yield Change(f"{other} instead of {name} in --plugins", (name,), (other,), keeps=True)
        yield Change(_dropped(name, why), drop=(name,))


def _dropped(name: str, why: str) -> str:
    return f"drop {name} from --plugins" if why.startswith("--plugins") else f"drop {why}"


def _precisions(asked: dict[str, str], refused: Checked) -> Iterator[Change]:
    """Every cell an installed plugin supports, with the formats' plugins exchanged."""
    facts, manifests = refused.facts, refused.manifests
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
        drop = tuple(n for n in asked if n in manifests and manifests[n].formats and n not in wanted)
        plugins = [*(n for n in asked if n not in drop), *(n for n in wanted if n not in asked)]
        flags = [
            _typed(facts.lookup(side).flag or _flag(side), v)
            for side, v in zip(SIDES, (pair.rollout, pair.train), strict=True)
        ]
        text = " ".join([f"--plugins {','.join(plugins)}"] * bool(plugins) + flags)
        yield Change(text, drop, tuple(wanted), dict(zip(SIDES, (pair.rollout, pair.train), strict=True)))


def _flag(path: str) -> str:
    return "--" + path.replace(".", "-").replace("_", "-")


def _typed(flag: str, value: Any) -> str:
    """An option as typed: ``--flag value``, ``--flag`` or ``--no-flag``."""
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {show(value)}"
