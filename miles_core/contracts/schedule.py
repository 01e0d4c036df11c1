"""The schedule: when samples are generated, seen from the weights they are generated with and trained on.

The loop asks for the groups of a step (``take``), trains on them, and pushes new weights while the schedule keeps the engine
``quiet``. What runs meanwhile is the schedule's: nothing (``sync``), the rollout of the next step (``ahead``), or generation
without an end into a bounded buffer (``async``). ``docs/schedules.md`` compares them.
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
    """Where generation stands when a step is complete: what a checkpoint keeps of it.

    Attributes:
        data: plain JSON: the prompts' position, and the prompts that are out and have to be generated again.
        samples: finished samples that no step has trained on, whole groups in order.
    """

    data: dict[str, Any]
    samples: tuple[Sample, ...] = ()


class Schedule(ABC):
    """Made by the provider of ``--schedule NAME``, ``make_schedule(run, collector, parts)``: it decides when groups are generated.

    Attributes:
        beside: whether an evaluation may run beside generation and training; it ends before the next push.
        seconds: how long the groups taken last were generated, for the tokens a second.
    """

    beside: bool = False
    seconds: float = 0.0

    @abstractmethod
    async def take(self, step: int) -> list[list[Sample]]:
        """The groups that step ``step`` (completed steps before it) trains on, ``--rollout-batch-size`` of them, less what
        plugins' ``wrap_rollout`` filters. Interrupted when the user asks to stop."""

    @abstractmethod
    def quiet(self, parts: PolicyParts) -> AbstractAsyncContextManager[None]:
        """Around the push of one policy's weights: inside, its engine is paused, and no request of this schedule gets a token.
        Never raises Interrupted: the step whose weights are pushed is trained and will be completed."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Numbers about what was taken last, and about the requests since the last call; nothing where all is as usual."""

    @abstractmethod
    def state(self) -> Position:
        """What to keep of generation; asked when a step is complete."""

    @abstractmethod
    def load_state(self, position: Position) -> None:
        """Go on from ``position``, perhaps another schedule's. Nothing is in flight then."""

    @abstractmethod
    async def close(self) -> None:
        """Stop everything in flight."""
