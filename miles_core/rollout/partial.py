"""Whether responses go on under new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.config import Config


def partial_rollout(config: Config) -> bool:
    """``--partial-rollout``. Where nothing was said it is on with ``--schedule async``, which would otherwise wait for the longest
    response before every push and be no faster than ``ahead``."""
    chosen = config.rollout.partial_rollout
    return config.run.schedule == "async" if chosen is None else chosen
