"""The environment of a toy run."""

from __future__ import annotations

from collections.abc import Sequence

from miles_environments.environment import Environment, Task


class Letters(Environment):
    """Rewards answers by the sum of their characters."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def task(self, number: int, level: int) -> Task:
        """Return one of eight letters as a prompt."""
        return Task("abcdefgh"[number % 8])

    def score(self, number: int, level: int, answers: Sequence[str | None]) -> list[float]:
        """Return a value between 0 and 6/7 for each answer."""
        return [sum(map(ord, answer or "")) % 7 / 7 for answer in answers]
