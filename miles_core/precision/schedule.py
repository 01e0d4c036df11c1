"""From when on a run computes in its number format: the warm-up.

Both sides start without quantisation and switch together when ``--warmup-steps`` optimiser steps are done. A rollout
and the steps that learn from it share one precision, so the switch is made between two rollout steps. The phase follows
from the number of optimiser steps alone, which every checkpoint holds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.contracts.policy import Policy
    from miles_core.run.run import Run

log = logging.getLogger(__name__)

#: The model copy as it is: no number format.
PLAIN = "bf16"


@dataclass(frozen=True)
class Precisions:
    """What each side computes in: a format's name or ``bf16``."""

    rollout: str
    train: str


def precisions(config: Config, trained: int) -> Precisions:
    """What both sides compute in after ``trained`` optimiser steps."""
    if trained < config.precision.warmup_steps:
        return Precisions(config.precision.warmup_precision, config.precision.warmup_precision)
    return Precisions(config.rollout.precision, config.train.precision)


def current(run: Run, policy: Policy) -> Precisions:
    """What both sides of a policy compute in now."""
    return policy.precisions or precisions(run.config, 0)


async def follow(run: Run, policy: Policy) -> None:
    """Bring both sides of a policy to the precision that is due; the engine then waits for its weights."""
    due = precisions(run.config, policy.trained)
    now = current(run, policy)
    if due == now:
        return
    assert policy.learner is not None and policy.engine is not None
    log.info(
        "after %d optimiser steps: rollout %s -> %s, training %s -> %s",
        policy.trained,
        now.rollout,
        due.rollout,
        now.train,
        due.train,
    )
    await policy.learner.rebuild(due)
    if due.rollout != now.rollout:
        await policy.engine.rebuild({"precision": due.rollout})
    policy.precisions = due
