"""Decides whether a response may continue under new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.config import Config


def partial_rollout(config: Config) -> bool:
    """Return ``--partial-rollout``. The default is True with ``--schedule async``, which would otherwise wait for the longest
    response before every weight push and be no faster than ``ahead``; with other schedules it is False."""
    chosen = config.rollout.partial_rollout
    return config.run.schedule == "async" if chosen is None else chosen
