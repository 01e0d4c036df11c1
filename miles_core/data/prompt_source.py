"""Interface of prompt sources: files, task generators, environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from miles_core.data.media import Media

Chat = list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One prompt.

    Attributes:
        prompt: a text, or chat messages with ``role`` and ``content``.
        label: ground truth for the reward; None if there is none.
        metadata: copied to every sample of the prompt; saved as JSON in checkpoints.
        index: position in the data set.
        place: location (``file:line``), for messages.
        policy: name of the policy that generates the response; "" for the first trained policy.
        examined: whether the prompt was checked and rendered before the run. If not, and it turns out to be invalid, it is left out
            with a warning; an error in an examined row ends the run.
        fault: why the row is invalid; "" if no error is known.
        media: what belongs to the content parts ``{"type": "image"}`` of the prompt, or to the placeholders in its text, in order.
    """

    prompt: str | Chat
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    place: str = "a row of the prompt source"
    policy: str = ""
    examined: bool = True
    fault: str = ""
    media: tuple[Media, ...] = ()


class PromptSource(ABC):
    """Supplies prompts. The provider of ``--prompts NAME`` creates it in the driver process; the default reads files.

    Attributes:
        length: number of rows until they repeat; None for an endless source. Evaluation needs a finite source.
    """

    length: int | None = None

    async def start(self) -> None:
        """Acquire resources. Called before all other methods, and again after ``stop`` when the run recovers from a lost worker."""

    async def stop(self) -> None:
        """Release resources. Called last however the run ends, and also if ``start`` failed."""

    @abstractmethod
    def next(self, n: int) -> list[Row]:
        """Return the next ``n`` rows; a finite source starts again at its end. Called between requests, so it must not block."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the position as JSON, for checkpoints."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a position: ``next`` then returns the rows that followed when ``state`` was called.

        Raises:
            DataError: the state belongs to different rows.
        """
