"""The task of a search, and the options that a layout may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.plugin import Facts
from miles_planner.layout import Changes
from miles_planner.workload import Workload


@dataclass(frozen=True)
class Task:
    """What is searched.

    Attributes:
        facts: all facts of the run as typed, including the hardware and the defaults of active plugins.
        requested: the requested plugins and why, as ``check`` takes them.
        manifests: the installed plugins.
        model: content of ``config.json``.
        work: the work of a step.
        any_precision: whether to search other number formats than those of the options.
    """

    facts: Facts
    requested: Mapping[str, str]
    manifests: Mapping[str, Any]
    model: Mapping[str, Any]
    work: Workload
    any_precision: bool = False

    @property
    def machine(self) -> int:
        """GPUs per machine."""
        return int(self.facts.value("gpu.count") or 0)

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.machine * int(self.facts.value("gpu.machines") or 1)


def change_facts(facts: Facts, changes: Changes) -> Facts:
    """Return the facts of the run with other options, as if the user had set them."""
    return facts.with_facts(
        dataclasses.replace(facts.lookup(name), value=value, origin="--search", chosen=True)
        for name, value in changes.items()
    )


def relax(facts: Facts, names: Sequence[str]) -> Facts:
    """Return the facts with the options ``names`` no longer set by the user, so that layouts may change them."""
    return facts.with_facts(dataclasses.replace(facts.lookup(name), chosen=False) for name in names)


def find_changes(facts: Facts, changes: Changes) -> dict[str, Any]:
    """Return the changes that differ from the run as typed."""
    return {name: value for name, value in changes.items() if name not in facts or facts.value(name) != value}


def conflicts(facts: Facts, changes: Changes) -> list[str]:
    """Return the names of options that the user set to another value than the changes."""
    return [
        name
        for name, value in changes.items()
        if name in facts and facts.lookup(name).chosen and facts.value(name) != value
    ]
