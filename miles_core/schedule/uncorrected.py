"""Warns if samples of older weights are trained on without a correction."""

from __future__ import annotations

import logging

from miles_core.contracts.run import Run

log = logging.getLogger(__name__)


def warn_uncorrected(run: Run) -> None:
    """Log a warning if no option or plugin corrects for the age of samples."""
    if run.hooks.implemented["wrap_correction"] or run.config.algorithm.use_rollout_logprobs:
        return
    log.warning(
        "--schedule %s trains on samples of older weights and nothing corrects for that: use the engine's log-probs as the old "
        "policy's (--use-rollout-logprobs), or a plugin that weights tokens by them",
        run.config.run.schedule,
    )
