"""The collection of a step's groups, as plugins shaped it."""

from __future__ import annotations

from miles_core.contracts.run import Run
from miles_core.plugin.chain import compose
from miles_core.rollout.collect import Rollout


def wrapped(run: Run, collect: Rollout) -> Rollout:
    """``collect(step)`` with the plugins' ``wrap_rollout`` around it."""
    return compose(collect, run.hooks.chain("wrap_rollout", run=run))
