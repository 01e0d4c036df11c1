"""The checks of a run: of an engine that received weights, and of samples before the learner trains on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from miles_core.contracts.run import Run, StashKey
from miles_core.contracts.runtime import PolicyParts
from miles_core.data.sample import Sample

#: Checks one policy after a sync; returns metrics, raises a MilesError to stop the run.
SyncCheck = Callable[[PolicyParts], Awaitable[Mapping[str, float]]]
#: Checks the samples of a step of one policy; raises a MilesError to stop the run.
SampleCheck = Callable[[PolicyParts, Sequence[Sample]], Awaitable[None]]

_CHECKS = StashKey[list[SyncCheck]]()
_SAMPLE_CHECKS = StashKey[list[SampleCheck]]()


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


async def check_samples(run: Run, parts: PolicyParts, samples: Sequence[Sample]) -> None:
    """Run every sample check of the plan on the samples of a step, before ``parts.learner`` trains on them.

    Raises:
        MilesError: a check failed and stops the run.
    """
    if _SAMPLE_CHECKS not in run.stash:
        made = (run.hooks.make("sample_check", name, run=run) for name in run.hooks.find_provided("sample_check"))
        run.stash[_SAMPLE_CHECKS] = [check for check in made if check is not None]
    for check in run.stash[_SAMPLE_CHECKS]:
        await check(parts, samples)
