"""Which number format a policy's weights travel in, and changing it while a run goes on."""

from __future__ import annotations

import logging

from miles_core.contracts.policy import Policy
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.precision.codec import Codec
from miles_core.precision.options import codec_for
from miles_core.precision.schedule import PLAIN, precisions

log = logging.getLogger(__name__)


def make_codec(run: Run, policy: Policy | None = None, precision: str | None = None) -> Codec:
    """The codec of the rollout: what a weight sync sends and the engine decodes.

    Args:
        run: with the options.
        policy: whose model it is; the run's only one by default.
        precision: a format's name or ``bf16``; by default what the rollout starts with.
    """
    config = run.config if policy is None else run.config_of(policy)
    precision = precision or precisions(config, 0).rollout
    if precision == PLAIN:
        return Codec()
    checkpoint = (policy.hf_checkpoint if policy else "") or run.config.model.hf_checkpoint
    return codec_for(run.hooks.format(precision), config, checkpoint)


def switch_is_due(run: Run, parts: PolicyParts) -> bool:
    """Whether the next sync brings another precision."""
    return precisions(run.config_of(parts.policy), parts.policy.trained) != parts.precisions


async def switch_when_due(run: Run, parts: PolicyParts) -> None:
    """Bring both sides of a policy to the precision that is due; the engine then waits for its weights."""
    now, due = parts.precisions, precisions(run.config_of(parts.policy), parts.policy.trained)
    if due == now:
        return
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
