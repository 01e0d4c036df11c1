"""Check a plan on workers, and compare the workers' digests on the driver.

A runtime with several processes sends the plan to each worker as JSON. ``Plan.from_json`` rejects text whose digest does not match its
content. Before a worker builds anything, it calls ``accept`` and returns the digest; the driver passes all digests to ``same_plan``.
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
        plan: the plan that the driver resolved.
        core: the worker's version of miles-core.
        manifests: the plugins installed on the worker, by name.
        facts: the facts detected on the worker.

    Returns:
        the digest to return to the driver.

    Raises:
        PlanError: miles-core or a plugin is missing or has another version, or a deferred rule does not hold on this hardware.
    """
    if plan.core != core:
        raise PlanError(
            f"plan {plan.digest} was made by miles-core {plan.core}, but {core} is installed here: install {plan.core}"
        )
    plan.check_installed(manifests)
    plan.check_deferred(facts)
    return plan.digest


def same_plan(digest: str, workers: Mapping[str, str]) -> None:
    """Compare the driver's digest with those of ``workers`` (name -> digest).

    Raises:
        PlanError: workers have other plans; names all of them.
    """
    others = "; ".join(f"{name} has {other}" for name, other in workers.items() if other != digest)
    if others:
        raise PlanError(
            f"the driver runs plan {digest} but {others}: install the same miles-core and plugins on every machine"
        )
