"""Runs checks of an engine's weights after a sync: the providers of the kind ``check`` in core and plugins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.stash import StashKey

#: Checks one policy after a sync; returns metrics, raises a MilesError to stop the run.
SyncCheck = Callable[[PolicyParts], Awaitable[Mapping[str, float]]]

_CHECKS = StashKey[list[SyncCheck]]()


async def check_synced(run: Run, parts: PolicyParts) -> dict[str, float]:
    """Run every check of the plan on a policy whose engine has just received its learner's weights.

    Returns:
        the merged metrics of all checks.

    Raises:
        MilesError: a check failed and stops the run.
    """
    if _CHECKS not in run.stash:
        made = (run.hooks.make("check", name, run=run) for name in run.hooks.find_provided("check"))
        run.stash[_CHECKS] = [check for check in made if check is not None]
    metrics: dict[str, float] = {}
    for check in run.stash[_CHECKS]:
        metrics |= await check(parts)
    return metrics
