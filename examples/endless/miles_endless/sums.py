"""Prompts that are generated on demand from a row index; the index is the source's whole state."""

import random

from miles_core.data import PromptSource, Row
from miles_core.plugin import ConfigError


class Sums(PromptSource):
    """Prompts ``a + b``, endless for training or of a finite number for evaluation.

    Args:
        largest: upper bound (exclusive) of both numbers.
        length: number of rows; None for an endless source.
        first: index of the first row, so that held-out rows differ from training rows.
    """

    def __init__(self, largest: int, length: int | None, first: int) -> None:
        self.largest, self.length, self.first, self.at = largest, length, first, 0

    def next(self, n: int) -> list[Row]:
        rows = [self._row(self.at + i) for i in range(n)]
        self.at += n
        return rows

    def state(self) -> dict[str, int]:
        return {"at": self.at, "largest": self.largest}

    def load_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def _row(self, number: int) -> Row:
        at = number if self.length is None else number % self.length
        draw = random.Random(self.first + at)
        a, b = draw.randrange(self.largest), draw.randrange(self.largest)
        return Row(f"{a} + {b} = ", label=str(a + b), index=at, place=f"sum {at}")


def make_prompts(data: str, purpose: str) -> Sums:
    """``--prompts sums --prompt-data 100``: numbers below 100. For ``--eval-prompts sums``, 16 other sums."""
    if not data.isdigit() or int(data) < 1:
        raise ConfigError(f"sums takes the largest number as its data, got {data!r}: --prompt-data 100")
    return Sums(int(data), None, 0) if purpose == "train" else Sums(int(data), 16, 1 << 32)
