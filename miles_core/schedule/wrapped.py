"""Applies the plugins' ``wrap_rollout`` hooks to the collection of groups."""

from __future__ import annotations

from miles_core.contracts.run import Run
from miles_core.plugin.chain import compose
from miles_core.rollout.collect import Rollout


def wrap_collect(run: Run, collect: Rollout) -> Rollout:
    """Return ``collect(step)`` wrapped with the plugins' ``wrap_rollout`` hooks."""
    return compose(collect, run.hooks.chain("wrap_rollout", run=run))
