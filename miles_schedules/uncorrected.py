"""What a user is told when samples of older weights are trained on as if they were of the newest."""

from __future__ import annotations

import logging

from miles_core.contracts.run import Run

log = logging.getLogger(__name__)


def warn_uncorrected(run: Run) -> None:
    """Say once that nothing corrects for the age of samples, where nothing does."""
    if run.hooks.implemented["wrap_correction"] or run.config.algorithm.use_rollout_logprobs:
        return
    log.warning(
        "--schedule %s trains on samples of older weights and nothing corrects for that: take the engine's log-probs for the old "
        "policy's (--use-rollout-logprobs), or a plugin that weighs tokens by them",
        run.config.run.schedule,
    )
