"""Facts: the named values that rules read, with their origins.

Examples: ``gpu.sm = 90 (detected: NVIDIA H200)``, ``model.moe = true (config.json: num_experts=128)``,
``rollout.precision = bf16 (default)``. A fact is in one of four states (``State``). Undefined names have their own state and are
always an error, which suggests similar names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from miles_core.nearest import did_you_mean

if TYPE_CHECKING:
    from miles_core.plugin.manifest import Plugin


#: Hint for an unknown name. It suggests no install command, because a package with the typed name may belong to anyone.
COMES_WITH = "others come with plugins; install the package that provides it (usually miles-plugin-NAME)"


#: Prefix of the names of facts about installed packages.
PACKAGE = "package"


class State(Enum):
    """The state of a fact on this host."""

    KNOWN = "known"
    UNKNOWN = "unknown on this host"  # rules are deferred: every worker checks them before it builds anything
    NOT_APPLICABLE = "not applicable"  # rules are vacuous
    NO_SUCH_NAME = "no such fact"  # rules fail with an error that suggests similar names


@dataclass(frozen=True)
class Fact:
    """One named value.

    Attributes:
        name: dotted name, e.g. ``rollout.precision``.
        value: bool, int, float, str or None; valid only if ``state`` is KNOWN.
        origin: origin of the value, as shown to the user.
        state: see ``State``.
        flag: the flag that sets the fact; empty if there is none.
        choices: the allowed values, for suggested fixes.
        chosen: whether the user set the value; a plugin may not silently change it.
        fixed: whether a resumed run must have the same value.
    """

    name: str
    value: Any
    origin: str
    state: State = State.KNOWN
    flag: str = ""
    choices: tuple[Any, ...] = ()
    chosen: bool = False
    fixed: bool = False

    def __str__(self) -> str:
        value = show(self.value) if self.state is State.KNOWN else self.state.value
        return f"{self.name} = {value} ({self.origin})"


def show(value: Any) -> str:
    """Format a value as users write it: ``true``, ``none``, ``1.5``, ``word``."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(show, value)) or "none"
    return str(value)


class Facts(Mapping[str, Fact]):
    """All facts of one run, by name. Immutable.

    Args:
        facts: the facts; later ones replace earlier ones with the same name.
        inactive: installed plugins that are not active; the facts that they define are not applicable.
    """

    def __init__(self, facts: Iterable[Fact] = (), inactive: Iterable[str] = ()) -> None:
        self._facts = {fact.name: fact for fact in facts}
        self._inactive = frozenset(inactive)

    def __getitem__(self, name: str) -> Fact:
        return self._facts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def __contains__(self, name: object) -> bool:
        return name in self._facts

    def keys(self) -> KeysView[str]:
        return self._facts.keys()

    def values(self) -> ValuesView[Fact]:
        return self._facts.values()

    def lookup(self, name: str) -> Fact:
        """Return the fact ``name`` in any state; never raises."""
        head, _, rest = name.partition(".")
        if rest and head in self._inactive:
            return Fact(name, None, f"{head} is not active", State.NOT_APPLICABLE)
        if name in self._facts:
            return self._facts[name]
        if head == "plugin" and rest:
            return Fact(name, False, f"no plugin {rest} is installed")
        return Fact(name, None, did_you_mean(name, self._facts), State.NO_SUCH_NAME)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a known fact, else ``default``."""
        # for other names, ``lookup`` searches for similar ones
        defined = name in self._facts or name.startswith("plugin.")
        fact = self.lookup(name) if defined else None
        return fact.value if fact is not None and fact.state is State.KNOWN else default

    @property
    def elsewhere(self) -> bool:
        """Whether the plan is for other machines: the user set facts of hosts (``--hardware``, ``--fact``)."""
        hosts = (f for f in self._facts.values() if f.chosen and not f.flag)
        return any(fact.name.partition(".")[0] not in ("env", "model", PACKAGE) for fact in hosts)

    def with_facts(self, facts: Iterable[Fact], inactive: Iterable[str] | None = None) -> Facts:
        """Return a copy with facts added or replaced."""
        copy = Facts((), self._inactive if inactive is None else inactive)
        copy._facts = self._facts | {fact.name: fact for fact in facts}
        return copy

    def scope(self, policy: str) -> Facts:
        """Return the facts of one policy, in which ``policies.NAME.x`` replaces ``x``."""
        prefix = f"policies.{policy}."
        own = [self._facts[name] for name in self._facts if name.startswith(prefix)] if self._policies else []
        return self.with_facts(dataclasses.replace(f, name=f.name.removeprefix(prefix)) for f in own) if own else self

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the run's policies, from the facts ``policies.NAME.*``; without such facts, one named ``policy``."""
        return self._policies or ("policy",)

    @cached_property
    def _policies(self) -> tuple[str, ...]:
        parts = [name.split(".") for name in self._facts if name.startswith("policies.")]
        return tuple(dict.fromkeys(found[1] for found in parts if len(found) > 2))


def defined_facts(plugin: Plugin) -> Iterator[Fact]:
    """Yield the facts that a manifest defines in addition to its options, as unknown."""
    for name, meaning in plugin.facts.items():
        yield Fact(name, None, f"defined by {plugin.name}: {meaning}", State.UNKNOWN)
