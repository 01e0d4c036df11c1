"""``reasoning_gym:DATA_SET``: procedural tasks with verifiers (github.com/open-thought/reasoning-gym).

Options are those of the data set (``min_terms=2``). Difficulty levels are those of the library's curriculum: level n sets every attribute to its
n-th value, or to the last one. Without a curriculum there is one level, with the options only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from miles_environments.entry import Entry
from miles_environments.environment import Environment, Task

#: Tasks of a data set are made from their index on demand; this is only the upper bound.
SIZE = 10**9


class ReasoningGym(Environment):
    """A data set of the library, endless."""

    answer = "tag"

    def __init__(self, entry: Entry, seed: int) -> None:
        from reasoning_gym import factory

        self.name, self.options, self.seed = entry.task, dict(entry.options), seed
        self._factory = factory
        curriculum = factory.create_curriculum(self.name) if factory.has_curriculum(self.name) else None
        self._uses_levels = curriculum is not None and (entry.curriculum or entry.level > 0)
        if curriculum is not None:
            self.levels = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1)
        self._data_set = lru_cache(maxsize=32)(self._make)
        self._row = lru_cache(maxsize=4096)(lambda number, level: self._data_set(level)[number])
        self._data_set(entry.level)  # checks the options

    def _make(self, level: int) -> Any:
        options = dict(self.options)
        if self._uses_levels:
            curriculum = self._factory.create_curriculum(self.name)
            for name, attribute in curriculum.attributes.items():
                curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
            made = vars(curriculum.generate_configuration({"seed": self.seed, "size": SIZE}))
            options = {**made, **options}
        return self._factory.create_dataset(self.name, **{**options, "seed": self.seed, "size": SIZE})

    def task(self, number: int, level: int) -> Task:
        row = self._row(number, level)
        return Task(str(row["question"]), row["answer"])

    def score(self, number: int, level: int, answers: Sequence[str | None]) -> list[float]:
        row = self._row(number, level)
        return [float(self._data_set(level).score_answer(answer, entry=row)) for answer in answers]


def make(entry: Entry, seed: int) -> ReasoningGym:
    """Make the environment of an entry."""
    return ReasoningGym(entry, seed)
