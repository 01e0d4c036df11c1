"""Creates the codec of a policy's weight sync, and switches precision during a run."""

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
    return codec_for(run.hooks.format(precision), config, checkpoint)


def switch_is_due(run: Run, parts: PolicyParts) -> bool:
    """Return whether the precision changes at the next sync."""
    return precisions(run.config_of(parts.policy), parts.policy.trained) != parts.precisions


async def switch_when_due(run: Run, parts: PolicyParts) -> None:
    """Rebuild both sides of a policy for the new precision, if it changes; the engine then waits for its weights."""
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
