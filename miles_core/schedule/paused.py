"""Pauses an engine while its weights change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts


@asynccontextmanager
async def pause_engine(run: Run, parts: PolicyParts) -> AsyncIterator[None]:
    """Pause the engine with ``--pause-generation-mode`` during the body. It is resumed only if the body succeeds, because after a failed
    push the engine's weights are incomplete."""
    await parts.serving.pause(run.config.rollout.pause_generation_mode)
    yield
    await parts.serving.resume()
