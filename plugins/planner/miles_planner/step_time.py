"""Seconds of a training step: generation, training and weight sync, one after the other or concurrently."""

from __future__ import annotations

from dataclasses import dataclass

from miles_planner.layout import EngineLayout
from miles_planner.rates import Rates
from miles_planner.rollout_time import RolloutTime
from miles_planner.training_time import TrainingTime
from miles_planner.workload import Workload

#: The transport without a plugin.
PLAIN = "copy"


@dataclass(frozen=True)
class StepTime:
    """Estimate for one step.

    Attributes:
        rollout, training: the two phases.
        sync: seconds of the weight sync.
        other: seconds of everything else.
        seconds: the whole step.
    """

    rollout: RolloutTime
    training: TrainingTime
    sync: float
    other: float
    seconds: float


def sync_seconds(rates: Rates, e: EngineLayout, colocated: bool, transport: str) -> float:
    """Seconds in which all engines receive new weights.

    With the transport ``copy``, weights pass through host memory, and one process of each engine receives all of them. All other transports
    are estimated like ``buckets``, which is between GPUs."""
    sent = e.weights * e.gpus
    if transport == PLAIN:
        return sent / rates.sync["copy_rate"]
    return rates.sync["fixed"] + sent / rates.sync["colocated_rate" if colocated else "rate"]


def step_time(
    rates: Rates,
    generated: RolloutTime,
    trained: TrainingTime,
    e: EngineLayout,
    work: Workload,
    colocated: bool,
    transport: str,
) -> StepTime:
    """Add up a step. With ``work.lag`` and GPUs of their own, engines generate while the trainer trains."""
    sync, other = sync_seconds(rates, e, colocated, transport), rates.seconds["step"]
    if work.lag and not colocated:
        seconds = max(generated.seconds, trained.seconds) + sync + other
    else:
        seconds = generated.seconds + trained.seconds + sync + other
    return StepTime(generated, trained, sync, other, seconds)
