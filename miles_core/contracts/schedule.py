"""The schedule contract: decides when samples are generated relative to training and weight updates.

The loop takes the groups of a step (``take``), trains on them, and pushes new weights while the schedule pauses the engine
(``pause_for_push``). During training a schedule may run nothing (``sync``), the rollout of the next step (``ahead``), or continuous
generation into a bounded buffer (``async``). ``docs/schedules.md`` compares them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.contracts.runtime import PolicyParts
    from miles_core.data.sample import Sample


@dataclass(frozen=True)
class Position:
    """State of generation after a completed step, saved in checkpoints.

    Attributes:
        data: JSON data: the position in the prompts, and the prompts in flight, which are generated again after a resume.
        samples: finished samples not yet used for training, as whole groups in order.
    """

    data: dict[str, Any]
    samples: tuple[Sample, ...] = ()


class Schedule(ABC):
    """Decides when groups are generated. ``make_schedule(run, collector, parts)`` of the provider of ``--schedule NAME`` builds it.

    Attributes:
        generates: False if the samples come from elsewhere, so that policies need no engines; the provider is then the class itself.
        beside: whether an evaluation may run concurrently with generation and training; it ends before the next push.
        seconds: generation time of the last groups taken, used for the tokens per second.
    """

    generates: bool = True
    beside: bool = False
    seconds: float = 0.0

    @abstractmethod
    async def take(self, step: int) -> list[list[Sample]]:
        """Return the groups to train on in step ``step`` (number of completed steps).

        Returns ``--rollout-batch-size`` groups. Raises Interrupted if the user requests a stop.
        """

    @abstractmethod
    def pause_for_push(self, parts: PolicyParts) -> AbstractAsyncContextManager[None]:
        """Context for pushing one policy's weights: its engine is paused, and no request of this schedule generates tokens.

        Never raises Interrupted, because the step whose weights are pushed has been trained and must be completed.
        """

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return metrics of the last groups taken and of the requests since the last call. May be empty."""

    @abstractmethod
    def state(self) -> Position:
        """Return the state of generation to save; called after a completed step."""

    @abstractmethod
    def load_state(self, position: Position) -> None:
        """Continue from ``position``, possibly saved by another schedule. Called when no request is in flight."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel all requests in flight."""
