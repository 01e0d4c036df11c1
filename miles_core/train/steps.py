"""Divides a rollout into optimiser steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from miles_core.data.sample import Sample

if TYPE_CHECKING:
    from miles_core.config.groups import Train as TrainOptions


def step_count(samples: int, options: TrainOptions) -> int:
    """Return the number of optimiser steps for a rollout of ``samples`` samples: ``--num-steps-per-rollout``, or the number that
    brings the size of each step closest to ``--global-batch-size``."""
    if options.global_batch_size:
        return max(1, round(samples / options.global_batch_size))
    return options.num_steps_per_rollout or 1


def optimiser_steps(samples: Sequence[Sample], options: TrainOptions) -> tuple[list[int], int]:
    """Assign each sample to an optimiser step.

    Steps are consecutive and as equal in size as possible, and samples with the same rollout id share a step. Call it with all
    samples of the rollout, before they are divided over ranks.

    Returns:
        the step of each sample (from 0), and the number of steps.
    """

    count = step_count(len(samples), options)
    ids = [s.index if s.rollout_id is None else s.rollout_id for s in samples]
    place = {rollout: n for n, rollout in enumerate(dict.fromkeys(ids))}
    count = min(count, len(place))
    edges = [round(i * len(place) / count) for i in range(1, count + 1)]
    return [bisect_right(edges, place[i]) for i in ids], count
