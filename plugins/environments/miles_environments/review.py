"""Checks of a plan with environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.plugin import ConfigError, Facts, Problem, Review, described
from miles_environments.entry import LIBRARIES, read_entries


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """Find malformed entries, and environments with several turns in a run with a single one."""
    problems: list[Problem] = []
    entries = []
    for fact, flag in (("environments.mix", "--environments"), ("environments.held_out", "--eval-environments")):
        found = facts.lookup(fact)
        try:
            entries += read_entries(tuple(found.value or ()), flag)
        except ConfigError as error:
            problems.append(
                Problem("environments", str(error), "this entry cannot be read", (described(found),), verb="refuses")
            )
    function = facts.lookup("rollout.generate")
    free = facts.lookup("rollout.generate_key").value or facts.lookup("rollout.custom_generate_function_path").value
    several = [entry.label for entry in entries if LIBRARIES[entry.library]]
    if several and function.value != "environments" and not free:
        problems.append(
            Problem(
                "environments",
                "rollout.generate == environments",
                f"an episode of {', '.join(several)} has several turns, and this rollout function plays them",
                (described(function),),
                choices=("rollout.generate",),
                tries=lambda: [{"rollout.generate": "environments"}],
            )
        )
    notes = []
    if entries:
        lines = [
            f"  {e.label}  {e.library}:{e.task}  weight {e.weight:g}{'  curriculum' if e.curriculum else ''}"
            for e in entries
        ]
        notes.append("\n".join(["environments", *lines]))
    return Review(tuple(notes), tuple(problems))
