"""Checks of a plan with environments."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from miles_core.plugin import ConfigError, Facts, Problem, Review, describe_fact
from miles_environments.entry import LIBRARIES, read_entries


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """Find malformed entries, and environments with several turns in a run with a single one."""
    problems: list[Problem] = []
    entries = []
    for fact, flag in (("environments.mix", "--environments"), ("environments.held_out", "--eval-environments")):
        found = facts.lookup(fact)
        try:
            entries += read_entries(split_fact(str(found.value or "")), flag)
        except ConfigError as error:
            problems.append(
                Problem(
                    "environments", str(error), "this entry cannot be read", (describe_fact(found),), verb="refuses"
                )
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
                (describe_fact(function),),
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


def split_fact(text: str) -> tuple[Any, ...]:
    """Split the fact of a list of entries, in which a comma separates texts and tables (as Python literals)."""
    entries: list[Any] = []
    while text:
        if not text.startswith("{"):
            one, _, text = text.partition(",")
            entries.append(one)
            continue
        ends = (at + 1 for at, character in enumerate(text) if character == "}")
        end, table = next((end, table) for end in ends if (table := _literal(text[:end])) is not None)
        entries.append(table)
        text = text[end:].removeprefix(",")
    return tuple(entries)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
