"""What a process does with a plan it was sent, and the driver with the answers.

A runtime that adds processes sends each of them the plan as JSON. Before it builds anything, a worker calls ``accept``
and returns the digest; the driver hands all digests to ``same_plan``. A worker's own ``Plan.from_json`` has already
refused a text whose content and digest disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from miles_core.errors import PlanError

if TYPE_CHECKING:
    from miles_core.plugin.facts import Fact
    from miles_core.plugin.manifest import Plugin
    from miles_core.plugin.plan import Plan


def accept(plan: Plan, core: str, manifests: Mapping[str, Plugin], facts: Iterable[Fact]) -> str:
    """Check a received plan against this worker.

    Args:
        plan: what the driver resolved.
        core: the version of miles-core here.
        manifests: the plugins installed here, by name.
        facts: what was detected here.

    Returns:
        The digest to send back.

    Raises:
        PlanError: miles-core or a plugin is missing or has another version here, or a rule left for the workers fails
            on this hardware.
    """
    if plan.core != core:
        raise PlanError(f"plan {plan.digest} was made by miles-core {plan.core}, here is {core}: install {plan.core}")
    plan.check_installed(manifests)
    plan.check_deferred(facts)
    return plan.digest


def same_plan(digest: str, workers: Mapping[str, str]) -> None:
    """Compare the driver's digest with those of ``workers`` (name -> digest).

    Raises:
        PlanError: names every worker that runs another plan.
    """
    others = "; ".join(f"{name} has {found}" for name, found in workers.items() if found != digest)
    if others:
        raise PlanError(
            f"the driver runs plan {digest} but {others}: install the same miles-core and plugins on every machine"
        )
