"""Hooks of the plugin: multiply importance weights into the correction of the optimizer step."""

from __future__ import annotations

import logging
from typing import Any

from miles_core.plugin import hookimpl
from miles_core.trainer import Correct, compose_corrections
from miles_tis.bounds import bounds, rejection_bounds
from miles_tis.config import TisConfig
from miles_tis.correction import correct, derived, needs

log = logging.getLogger(__name__)


class Tis:
    """Applies importance weights, rejection and OPSM."""

    def __init__(self, options: TisConfig) -> None:
        self.options = options

    @hookimpl
    def on_start(self, run: Any) -> None:
        options, train = self.options, run.config.train
        low, high = bounds(options)
        rejection_bounds(options)
        if options.weighs and high == 1 and low in (0, 1):
            effect = {
                "truncate": "all weights above 1 become 1",
                "clip": "no weight can be above 1" if low == 0 else "every weight is 1, so the correction does nothing",
                "mask": "tokens above 1 are dropped"
                if low == 0
                else "every token whose probabilities differ is dropped",
            }[options.mode]
            log.warning("--tis-mode %s with an upper bound of 1: %s; 2 is usual", options.mode, effect)
        one_step = (train.num_steps_per_rollout or 1) == 1 and not train.global_batch_size
        if options.opsm and one_step and not run.config.algorithm.use_rollout_logprobs:
            log.warning(
                "--use-opsm has no effect with one optimizer step per rollout, because the policy is still the old one; set "
                "--num-steps-per-rollout or --global-batch-size"
            )

    @hookimpl
    def wrap_correction(self) -> Any:
        def wrap(inner: Correct) -> Correct:
            return compose_corrections(inner, lambda inputs: correct(inputs, self.options), needs(self.options))

        return wrap

    @hookimpl
    def on_step(self, metrics: dict[str, float]) -> None:
        metrics |= derived(metrics)
