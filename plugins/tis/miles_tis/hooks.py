"""Where tis plugs in: it multiplies the correction of the optimiser step."""

from __future__ import annotations

import logging

from miles_core.algorithm.correction import Correct, compose_corrections
from miles_core.plugin.hooks import hookimpl
from miles_tis.correction import bounds, importance_correction

log = logging.getLogger(__name__)


class Tis:
    @hookimpl
    def on_start(self, run):
        options = run.config.plugin("tis")
        low, high = bounds(options)
        if low == high:
            effect = {
                "truncate": "weights above 1 are cut to 1",
                "clip": "every weight is 1, so the correction does nothing",
                "mask": "every token whose probabilities differ at all is dropped",
            }[options.mode]
            log.warning("--tis-threshold 1 with --tis-mode %s leaves no range: %s; 2 is usual", options.mode, effect)

    @hookimpl
    def wrap_correction(self, run):
        options = run.config.plugin("tis")

        def wrap(inner: Correct) -> Correct:
            return compose_corrections(inner, lambda inputs: importance_correction(inputs, options))

        return wrap
