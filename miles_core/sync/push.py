"""Pushes a weight version to the engine, and retries a failed push."""

from __future__ import annotations

import logging

from miles_core.contracts.runtime import PolicyParts
from miles_core.contracts.transport import SyncReport
from miles_core.errors import SyncError

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
