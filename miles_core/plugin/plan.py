"""The plan: what a run consists of, decided once in the driver before anything is built.

It names the plugins in order with their versions, the values they set, the facts and where those came from, the hook
classes to import and the rules left for the workers. It is printed in the run's header with its digest, saved with
every checkpoint, sent to every worker and compared there. It is data: no class and no function of a plugin is in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import CheckpointError, PlanError
from miles_core.plugin.facts import Fact, Facts, State, show
from miles_core.plugin.problem import Problem, described, refusal
from miles_core.plugin.rule import Truth, UnknownFact, evaluate, names, parse
from miles_core.redact import redact_values

if TYPE_CHECKING:
    from miles_core.plugin.manifest import Plugin


@dataclass(frozen=True)
class Active:
    """One plugin of a plan.

    Attributes:
        name, version: from its manifest.
        source: the distribution, or ``file:PATH sha256:...`` of a single-file plugin.
        because: why it is active: a flag, or who required it.
    """

    name: str
    version: str
    source: str
    because: str


@dataclass(frozen=True)
class Setting:
    """A value one plugin gives to another part's option."""

    path: str
    value: Any
    plugin: str


@dataclass(frozen=True)
class HookTarget:
    """A hooks class to import, ``module:Class``. ``deferred``: ``condition`` is unknown here and decided on each
    worker."""

    plugin: str
    target: str
    condition: str = ""
    deferred: bool = False


@dataclass(frozen=True)
class Deferred:
    """A rule each worker checks on its own hardware before it builds anything. ``holds_here``: it is met on the
    driver's host and checked again because it speaks of the GPU; otherwise it could not be decided there."""

    who: str
    needs: str
    because: str
    when: str = ""
    holds_here: bool = False


@dataclass(frozen=True)
class Plan:
    """What was resolved: plugins in order, facts, values to set, hook classes, rules for the workers.

    Attributes:
        core: version of miles-core.
        plugins: in order; the first one is the outermost of every wrap chain.
        facts: every fact, values set by plugins included.
        consulted: names of the facts some rule asked for.
        sets: values to apply before anything is built.
        hooks: classes to import, in plan order.
        deferred: rules for the workers.
        advice: notes for the user, in order.
        waived: hardware rules not met here, whose numerics are emulated.
        reviews: what plugins worked out about this run, blocks of text.
    """

    core: str
    plugins: tuple[Active, ...] = ()
    facts: tuple[Fact, ...] = ()
    consulted: tuple[str, ...] = ()
    sets: tuple[Setting, ...] = ()
    hooks: tuple[HookTarget, ...] = ()
    deferred: tuple[Deferred, ...] = ()
    advice: tuple[str, ...] = ()
    waived: tuple[str, ...] = ()
    reviews: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the plugins, outermost first."""
        return tuple(p.name for p in self.plugins)

    def fact(self, name: str, default: Any = None) -> Any:
        """The value of a known fact, else ``default``."""
        return self._facts.value(name, default)

    def holds(self, condition: str) -> bool:
        """Whether a condition of ``miles_core.plugin.rule`` is known to hold in this run; an empty one does, and one about
        something that is not installed does not."""
        try:
            return evaluate(condition, self._facts.lookup) is Truth.TRUE
        except UnknownFact:
            return False

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits over what can change the numbers: versions, order, consulted facts, sets and
        hooks."""
        content = {
            "core": self.core,
            "plugins": [(p.name, p.version) for p in self.plugins],
            "facts": [(f.name, f.value, f.state.name) for f in self.facts if f.name in self.consulted],
            "sets": [(s.path, s.value) for s in self.sets],
            "hooks": [(h.plugin, h.target) for h in self.hooks],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def header(self) -> str:
        """The line a run prints first."""
        listed = ", ".join(f"{p.name} {p.version}" for p in self.plugins) or "none"
        return f"miles-core {self.core}, plugins: {listed} (plan {self.digest})"

    def to_json(self) -> str:
        """The plan as one JSON object, its digest included."""
        return self._text

    def record(self) -> dict[str, Any]:
        """The plan as a run keeps it and compares it with later ones: without credentials."""
        found: dict[str, Any] = json.loads(self._redacted)
        return found

    @cached_property
    def _redacted(self) -> str:
        return json.dumps(redact_values(json.loads(self._text)))

    @cached_property
    def _text(self) -> str:
        # made once: a run writes it into every checkpoint
        content = {
            "digest": self.digest,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
        }
        content["facts"] = [{**vars(fact), "state": fact.state.name} for fact in self.facts]
        return "{\n" + ",\n".join(f" {json.dumps(name)}: {_lined(value)}" for name, value in content.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan ``to_json`` wrote.

        Raises:
            CheckpointError: the text is not a plan, or its digest is not that of its content.
        """
        try:
            content = json.loads(text)
            digest = content.pop("digest")
            facts = [Fact(**{**_frozen(f), "state": State[f["state"]]}) for f in content.pop("facts")]
            parts = {"plugins": Active, "sets": Setting, "hooks": HookTarget, "deferred": Deferred}
            for name, kind in parts.items():
                content[name] = tuple(kind(**_frozen(item)) for item in content[name])
            plan = cls(**{**content, **{k: tuple(content[k]) for k in _NAMES}, "facts": tuple(facts)})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"this is not a plan that miles wrote ({error!r})") from error
        if plan.digest != digest:
            raise CheckpointError(f"the plan says its digest is {digest}, its content has {plan.digest}: it was edited")
        return plan

    def compare(self, other: Plan) -> tuple[str, ...]:
        """What differs in ``other``, one sentence each; empty when the digests agree."""
        if self.digest == other.digest:
            return ()
        lines = _differences("miles-core", {"version": self.core}, {"version": other.core})
        lines += _differences(
            "plugin", {p.name: p.version for p in self.plugins}, {p.name: p.version for p in other.plugins}
        )
        if set(self.order) == set(other.order) and self.order != other.order:
            lines.append(f"order: {', '.join(self.order)} here, {', '.join(other.order)} there")
        shared = {*self.consulted, *other.consulted}
        lines += _differences("fact", _known(self.facts, shared), _known(other.facts, shared))
        lines += _differences("set", {s.path: s.value for s in self.sets}, {s.path: s.value for s in other.sets})
        lines += _differences("hooks", {h.target: "used" for h in self.hooks}, {h.target: "used" for h in other.hooks})
        return tuple(lines)

    def check_deferred(self, facts: Iterable[Fact]) -> None:
        """Check on a worker what the driver could not.

        Args:
            facts: what was detected on this worker; they replace the plan's own.

        Raises:
            PlanError: one problem for every rule that does not hold here, or that cannot be decided here either.
        """
        here = self._facts.having(facts)
        problems = []
        for rule in self.deferred:
            if evaluate(rule.when, here.lookup) not in (Truth.TRUE, Truth.UNKNOWN):
                continue
            if evaluate(rule.needs, here.lookup) in (Truth.FALSE, Truth.UNKNOWN):
                values = tuple(described(here.lookup(n)) for n in dict.fromkeys(names(parse(rule.needs))))
                problems.append(Problem(rule.who, rule.needs, rule.because, values))
        if problems:
            raise PlanError(refusal(problems, None, "this worker cannot start"), tuple(problems))

    def check_installed(self, manifests: Mapping[str, Plugin]) -> None:
        """Check on a worker, or at resume, that the plugins installed here are those of the plan.

        Raises:
            PlanError: names every plugin that is missing or has another version.
        """
        wrong = []
        for plugin in self.plugins:
            found = manifests[plugin.name].version if plugin.name in manifests else "not installed"
            if found != plugin.version:
                wrong.append(f"{plugin.name}: {plugin.version} in the plan, {found} here")
        if wrong:
            raise PlanError(f"plan {self.digest} does not fit what is installed here: {'; '.join(wrong)}")

    @property
    def files(self) -> tuple[Path, ...]:
        """Single-file plugins of this plan, for a worker's catalogue."""
        marked = [p.source for p in self.plugins if p.source.startswith("file:")]
        return tuple(Path(s.removeprefix("file:").rpartition(" ")[0]) for s in marked)

    @property
    def _facts(self) -> Facts:
        active = {p.name for p in self.plugins}
        hidden = {f.name.partition(".")[2] for f in self.facts if f.name.startswith("plugin.")} - active
        return Facts(self.facts, hidden)


def _lined(value: Any) -> str:
    """A list with one item a line, dataclasses as objects; anything else on one line."""
    if not isinstance(value, list | tuple) or not value:
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(json.dumps(item, default=dataclasses.asdict) for item in value) + "\n ]"


_NAMES = ("consulted", "advice", "waived", "reviews")


def plain(value: Any) -> Any:
    """A value as it is stored: JSON scalars, tuples for sequences, text for everything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(plain(v) for v in value)
    return str(value)


def _frozen(item: dict[str, Any]) -> dict[str, Any]:
    return {key: plain(value) for key, value in item.items()}


def _known(facts: Iterable[Fact], wanted: set[str]) -> dict[str, Any]:
    return {f.name: described(f)[1] for f in facts if f.name in wanted}


def _differences(what: str, mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    lines = []
    for name in dict.fromkeys([*mine, *other]):
        here, there = (show(side[name]) if name in side else "absent" for side in (mine, other))
        if here != there:
            lines.append(f"{what} {name}: {here} here, {there} there")
    return lines
