"""How a rollout is divided into optimiser steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from miles_core.data.sample import Sample

if TYPE_CHECKING:
    from miles_core.config.groups import Train as TrainOptions


def step_count(samples: int, options: TrainOptions) -> int:
    """Optimiser steps made of a rollout of so many samples: ``--num-steps-per-rollout``, or as many as bring each closest
    to ``--global-batch-size``."""
    if options.global_batch_size:
        return max(1, round(samples / options.global_batch_size))
    return options.num_steps_per_rollout or 1


def optimiser_steps(samples: Sequence[Sample], options: TrainOptions) -> tuple[list[int], int]:
    """The optimiser step of each sample and how many there are: consecutive, rollouts kept whole, sizes as equal as that
    allows. Asked once, where all samples of the rollout are known, before they are divided over ranks."""
    count = step_count(len(samples), options)
    ids = [s.index if s.rollout_id is None else s.rollout_id for s in samples]
    place = {rollout: n for n, rollout in enumerate(dict.fromkeys(ids))}
    count = min(count, len(place))
    edges = [round(i * len(place) / count) for i in range(1, count + 1)]
    return [bisect_right(edges, place[i]) for i in ids], count
