"""A response that an engine in this process sets later, without a task for its request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.contracts.engine import Response


def _ignore(answer: Answer) -> None:
    """Receiver of an answer that is awaited."""


class Answer(asyncio.Future["Response"]):
    """A response that an engine sets later. Where ``generate`` returns answers instead of coroutines, all those that a step of the engine sets
    reach their receivers together, without a task and an event for each.

    Args:
        cancelled: collects answers whose receivers cancelled them.

    Attributes:
        receiver: called with the answer once it is done.
    """

    def __init__(self, cancelled: list[Answer]) -> None:
        super().__init__()
        self._all_cancelled = cancelled
        self.receiver: Callable[[Answer], object] = _ignore

    def set_result(self, result: Response) -> None:
        super().set_result(result)
        self.receiver(self)

    def set_exception(self, exception: type | BaseException) -> None:
        super().set_exception(exception)
        self.receiver(self)

    def cancel(self, msg: Any = None) -> bool:
        if done := super().cancel(msg):
            self._all_cancelled.append(self)
            self.receiver(self)
        return done
