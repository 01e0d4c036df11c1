"""From the plugins a user asked for to an accepted plan, or to a refusal with the fixes that hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_core.errors import PlanError
from miles_core.plugin.check import check
from miles_core.plugin.facts import Facts
from miles_core.plugin.fixes import Startable, fixes
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import Plan
from miles_core.plugin.problem import refusal


def resolve(
    requested: Sequence[str] | Mapping[str, str],
    manifests: Mapping[str, Plugin],
    facts: Facts,
    startable: Startable = lambda facts: (),
) -> Plan:
    """The accepted plan.

    Args:
        requested: plugins in command-line order; as a mapping, name -> the flag that asked for it.
        manifests: every plugin that may take part, by name; core's own is added.
        facts: options (name = option path), host and model facts.
        startable: what else is wrong with a run of these facts, one sentence each; a fix must pass it too.

    Raises:
        PlanError: the run cannot start; ``problems`` holds every violation, the message also the fixes that hold.
    """
    checked = check(requested, manifests, facts)
    if checked.problems:
        found = [fix.text for fix in fixes(requested, manifests, facts, checked, startable=startable)]
        raise PlanError(refusal(checked.problems, found), tuple(checked.problems))
    return checked.plan()
