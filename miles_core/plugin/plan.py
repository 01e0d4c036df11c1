"""The plan: the resolved composition of a run.

The driver resolves the plan once, before anything is built. The plan lists the plugins in order with their versions, the values
they set, the facts with their origins, the hook classes to import, and the rules deferred to workers. Its digest is printed in
the run's header; the plan is saved with every checkpoint and sent to every worker, which checks it. It contains only data.
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
from miles_core.plugin.facts import Fact, Facts, State
from miles_core.plugin.problem import Problem, describe_fact, refusal
from miles_core.plugin.rule import Truth, UnknownFact, evaluate, names, parse
from miles_core.redact import redact_values
from miles_core.version import __version__

if TYPE_CHECKING:
    from miles_core.plugin.manifest import Plugin


@dataclass(frozen=True)
class Active:
    """One plugin of a plan.

    Attributes:
        name, version: name and version in the manifest.
        source: the distribution, or ``file:PATH sha256:...`` for a single-file plugin.
        because: why the plugin is active: a flag, or the plugin that requires it.
    """

    name: str
    version: str
    source: str
    because: str


@dataclass(frozen=True)
class Setting:
    """A value that a plugin sets for an option."""

    path: str
    value: Any
    plugin: str


@dataclass(frozen=True)
class HookTarget:
    """A hook class to import, ``module:Class``. ``deferred``: the driver could not decide ``condition``; each worker decides it."""

    plugin: str
    target: str
    condition: str = ""
    deferred: bool = False


@dataclass(frozen=True)
class Deferred:
    """A rule that each worker checks on its own hardware before it builds anything.

    ``holds_here``: the rule holds on the driver's host and is checked again because it is about the GPU; if False, the driver could
    not decide it.
    """

    who: str
    needs: str
    because: str
    when: str = ""
    holds_here: bool = False


@dataclass(frozen=True)
class Plan:
    """The resolved composition of a run.

    Attributes:
        core: version of miles-core.
        plugins: plugins in order; the first is the outermost in every chain of wrappers.
        facts: all facts, including values set by plugins.
        consulted: names of the facts that rules read.
        sets: values to apply before anything is built.
        hooks: hook classes to import, in plan order.
        deferred: rules for the workers to check.
        advice: notes for the user, in order.
        waived: hardware rules that this host does not meet, because the format is emulated.
        reviews: blocks of text from the plugins' reviews.
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
        """Return the value of a known fact, else ``default``."""
        return self._facts.value(name, default)

    def holds(self, condition: str) -> bool:
        """Whether a condition (``miles_core.plugin.rule``) is known to hold in this run.

        An empty condition holds; a condition about something that is not installed does not.
        """
        try:
            return evaluate(condition, self._facts.lookup) is Truth.TRUE
        except UnknownFact:
            return False

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of a hash over everything that can change results: versions, order, consulted facts, sets, hooks."""
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
        """The first line of a run's output."""
        listed = ", ".join(f"{p.name} {p.version}" for p in self.plugins) or "none"
        return f"miles-core {self.core}, plugins: {listed} (plan {self.digest})"

    def to_json(self) -> str:
        """Return the plan as one JSON object, including its digest."""
        return self._text

    def record(self) -> dict[str, Any]:
        """Return the plan as JSON data without credentials, as a run saves it and compares it with later plans."""
        data: dict[str, Any] = json.loads(self._redacted)
        return data

    @cached_property
    def _redacted(self) -> str:
        return json.dumps(redact_values(json.loads(self._text)))

    @cached_property
    def _text(self) -> str:
        # cached, because a run writes it to every checkpoint
        content = {
            "digest": self.digest,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
        }
        content["facts"] = [{**vars(fact), "state": fact.state.name} for fact in self.facts]
        entries = (f" {json.dumps(name)}: {_format_json(value)}" for name, value in content.items())
        return "{\n" + ",\n".join(entries) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse a plan written by ``to_json``.

        Raises:
            CheckpointError: the text is not a plan, or its digest does not match its content.
        """
        try:
            content = json.loads(text)
            digest = content.pop("digest")
            facts = [Fact(**{**_freeze(f), "state": State[f["state"]]}) for f in content.pop("facts")]
            parts = {"plugins": Active, "sets": Setting, "hooks": HookTarget, "deferred": Deferred}
            for name, kind in parts.items():
                content[name] = tuple(kind(**_freeze(item)) for item in content[name])
            plan = cls(**{**content, **{k: tuple(content[k]) for k in _NAMES}, "facts": tuple(facts)})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"this is not a plan that miles wrote ({error!r})") from error
        if plan.digest != digest:
            raise CheckpointError(f"the plan says its digest is {digest}, its content has {plan.digest}: it was edited")
        return plan

    def check_deferred(self, facts: Iterable[Fact]) -> None:
        """Check the deferred rules on a worker.

        Args:
            facts: facts detected on this worker; they replace the plan's facts.

        Raises:
            PlanError: holds one problem for each rule that does not hold, or that the worker cannot decide either.
        """
        here = self._facts.with_facts(facts)
        problems = []
        for rule in self.deferred:
            if evaluate(rule.when, here.lookup) not in (Truth.TRUE, Truth.UNKNOWN):
                continue
            if evaluate(rule.needs, here.lookup) in (Truth.FALSE, Truth.UNKNOWN):
                values = tuple(describe_fact(here.lookup(n)) for n in dict.fromkeys(names(parse(rule.needs))))
                problems.append(Problem(rule.who, rule.needs, rule.because, values))
        if problems:
            raise PlanError(refusal(problems, None, "this worker cannot start"), tuple(problems))

    def check_installed(self, manifests: Mapping[str, Plugin]) -> None:
        """Check on a worker that miles-core and the installed plugins match the plan.

        Raises:
            PlanError: miles-core has another version, or plugins are missing or have other versions; names all of them.
        """
        if self.core != __version__:
            raise PlanError(
                f"plan {self.digest} was made by miles-core {self.core}, but {__version__} is installed here: install {self.core}"
            )
        wrong = []
        for plugin in self.plugins:
            installed = manifests[plugin.name].version if plugin.name in manifests else "not installed"
            if installed != plugin.version:
                wrong.append(f"{plugin.name}: {plugin.version} in the plan, {installed} here")
        if wrong:
            raise PlanError(f"plan {self.digest} does not match the installed plugins: {'; '.join(wrong)}")

    @property
    def files(self) -> tuple[Path, ...]:
        """Paths of the plan's single-file plugins, for a worker's catalogue."""
        marked = [p.source for p in self.plugins if p.source.startswith("file:")]
        return tuple(Path(s.removeprefix("file:").rpartition(" ")[0]) for s in marked)

    @cached_property
    def _facts(self) -> Facts:
        active = {p.name for p in self.plugins}
        hidden = {f.name.partition(".")[2] for f in self.facts if f.name.startswith("plugin.")} - active
        return Facts(self.facts, hidden)


def _format_json(value: Any) -> str:
    """Format a list with one item per line and dataclasses as objects, and any other value on one line."""
    if not isinstance(value, list | tuple) or not value:
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(json.dumps(item, default=dataclasses.asdict) for item in value) + "\n ]"


_NAMES = ("consulted", "advice", "waived", "reviews")


def plain(value: Any) -> Any:
    """Convert a value to JSON scalars and tuples; other types become text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(plain(v) for v in value)
    return str(value)


def _freeze(item: dict[str, Any]) -> dict[str, Any]:
    return {key: plain(value) for key, value in item.items()}
