"""Where prompts come from: a file, a generator of tasks, an environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

Chat = list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One prompt.

    Attributes:
        prompt: a text, or chat messages with ``role`` and ``content``.
        label: what the reward compares with; None where there is nothing.
        metadata: travels with every sample of the prompt, as JSON through checkpoints.
        index: position in the data set.
        place: where it is from (``file:line``), for messages.
        policy: name of the policy that answers; "" is the first one that trains.
    """

    prompt: str | Chat
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    place: str = "a row of the prompt source"
    policy: str = ""


class PromptSource(ABC):
    """Made by the provider of ``--prompts NAME``. It lives in the driver; the file is the default.

    Attributes:
        length: how many rows there are until they repeat; None where they never end. Evaluation needs a number.
    """

    length: int | None = None

    async def start(self) -> None:
        """Bring up what it needs. Called before anything else; again, after ``stop``, when the run recovers from a lost worker."""

    async def stop(self) -> None:
        """Release it, also where ``start`` failed. Called last, whatever ended the run."""

    @abstractmethod
    def next(self, n: int) -> list[Row]:
        """The next ``n`` rows; a finite source begins again at its end. Called between requests, so it must not block."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The position, as JSON: checkpoints keep it."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken: ``next`` returns the rows that followed it then.

        Raises:
            DataError: the rows are not those that the state is a position in.
        """
