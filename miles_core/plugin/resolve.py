"""Resolve the requested plugins to a plan, or reject the run and suggest fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_core.errors import PlanError
from miles_core.plugin.check import check
from miles_core.plugin.facts import Facts
from miles_core.plugin.fixes import Startable, find_fixes
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import Plan
from miles_core.plugin.problem import refusal


def resolve(
    requested: Sequence[str] | Mapping[str, str],
    manifests: Mapping[str, Plugin],
    facts: Facts,
    startable: Startable = lambda facts: (),
) -> Plan:
    """Check a run and return its plan.

    Args:
        requested: plugins in command-line order, or plugin -> flag that requested it.
        manifests: the available plugins by name, without core.
        facts: options (name = option path), host and model facts.
        startable: returns error messages for further problems of a run with these facts; suggested fixes have none.

    Raises:
        PlanError: the run cannot start; ``problems`` holds every violation, and the message also lists accepted fixes.
    """
    result = check(requested, manifests, facts)
    if result.problems:
        suggestions = [fix.text for fix in find_fixes(requested, dict(manifests), facts, result, startable=startable)]
        raise PlanError(refusal(result.problems, suggestions), tuple(result.problems), result.sets)
    return result.plan()
