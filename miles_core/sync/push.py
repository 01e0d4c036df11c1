"""Weight sync: the codec of a policy, its precision, the push of a version with retries, and the checks after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from miles_core.contracts.run import Policy, Run, StateKey
from miles_core.contracts.runtime import PolicyParts
from miles_core.contracts.transport import SyncReport, Transport
from miles_core.data.weight_unit import Encoded
from miles_core.errors import SyncError
from miles_core.precision.codec import Codec
from miles_core.precision.format import Stored
from miles_core.precision.schedule import PLAIN, precisions

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine


log = logging.getLogger(__name__)


async def stage(parts: PolicyParts, version: int) -> None:
    """Send ``version`` to the engine before it is paused, if the transport supports this; ``push`` then activates it. If staging fails,
    ``push`` sends the weights."""
    try:
        await parts.learner.stage(version)
    except SyncError as error:
        log.warning("version %d could not be staged and is sent while the engine waits: %s", version, error)
        await parts.learner.stage(None)


async def push(parts: PolicyParts, version: int) -> SyncReport:
    """Push ``version``; the engine serves it when this returns. A failed push is retried once, and then replaced by the plain copy, which
    every engine supports, for the rest of the run.

    Raises:
        SyncError: the plain copy failed too.
    """
    try:
        return await parts.learner.push(version)
    except SyncError as error:
        log.warning("weights of version %d are pushed again: %s", version, error)
    try:
        return await parts.learner.push(version)
    except SyncError as error:
        log.warning(
            "weights travel by the plain copy from version %d on, because a push failed twice: %s", version, error
        )
    return await parts.learner.push(version, plain=True)


def make_codec(run: Run, policy: Policy | None = None, precision: str | None = None) -> Codec:
    """Create the codec with which a weight sync encodes and the engine decodes.

    Args:
        run: provides the options.
        policy: the policy of the model; the run's only policy by default.
        precision: a format's name or ``bf16``; the rollout's initial precision by default.
    """
    config = run.config if policy is None else run.config_of(policy)
    precision = precision or precisions(config, 0).rollout
    if precision == PLAIN:
        return Codec()
    checkpoint = (policy.hf_checkpoint if policy else "") or run.config.model.hf_checkpoint
    format = run.hooks.format(precision)
    codec: Codec = run.hooks.make("codec", "format", format=format, config=config, checkpoint=checkpoint)
    return codec


def switch_is_due(run: Run, parts: PolicyParts) -> bool:
    """Return whether the precision changes at the next sync."""
    config = run.config_of(parts.policy)
    return config.precision.warmup_steps > 0 and precisions(config, parts.policy.trained) != parts.precisions


async def switch_when_due(run: Run, parts: PolicyParts) -> None:
    """Rebuild both sides of a policy for the new precision, if it changes; the engine then waits for its weights."""
    if not switch_is_due(run, parts):
        return
    now, due = parts.precisions, precisions(run.config_of(parts.policy), parts.policy.trained)
    log.info(
        "after %d optimiser steps: rollout %s -> %s, training %s -> %s",
        parts.policy.trained,
        now.rollout,
        due.rollout,
        now.train,
        due.train,
    )
    await parts.learner.rebuild(due)
    if due.rollout != now.rollout:
        await parts.serving.rebuild(due.rollout)
    parts.precisions = due


class CopyTransport(Transport):
    """Passes the stream to an engine in this process, which copies it to its own weights."""

    repeats = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def reserve(self, name: str, stored: Mapping[str, Stored]) -> Mapping[str, Tensor] | None:
        return self.engine.reserve(name, stored)

    async def send(self, units: Iterator[Encoded], version: int) -> SyncReport:
        started, nbytes, tensors = time.perf_counter(), 0, 0

        def count_sizes() -> Iterator[Encoded]:
            nonlocal nbytes, tensors
            for unit in units:
                nbytes += unit.nbytes
                tensors += len(unit.parts)
                yield unit

        await self.engine.update_weights(count_sizes(), version)
        return SyncReport(version, nbytes, tensors, time.perf_counter() - started)


#: Checks one policy after a sync; returns metrics, raises a MilesError to stop the run.
SyncCheck = Callable[[PolicyParts], Awaitable[Mapping[str, float]]]

_CHECKS = StateKey[list[SyncCheck]]()


async def check_synced(run: Run, parts: PolicyParts) -> dict[str, float]:
    """Run every check of the plan on a policy whose engine has just received its learner's weights.

    Returns:
        the merged metrics of all checks.

    Raises:
        MilesError: a check failed and stops the run.
    """
    if _CHECKS not in run.state:
        made = (run.hooks.make("check", name, run=run) for name in run.hooks.find_provided("check"))
        run.state[_CHECKS] = [check for check in made if check is not None]
    metrics: dict[str, float] = {}
    for check in run.state[_CHECKS]:
        metrics |= await check(parts)
    return metrics
