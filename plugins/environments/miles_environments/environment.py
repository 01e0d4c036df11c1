"""The interface of environments: task sets that are scored, and episodes that are played.

Adapters of libraries implement it, and a user's class in ``--environments file:FILE.py:Class`` may.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.plugin import DataError
from miles_environments.entry import Entry

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
#: A decimal number. A minus after a digit, a letter or a bracket is an operator ("5-3"), not a sign.
_NUMBER = re.compile(r"(?:(?<![\w)\].])-)?\d+(?:,\d{3})*(?:\.\d+)?")
#: System message of environments whose answer is in a tag.
TAG_INSTRUCTIONS = "Give the final answer between <answer> and </answer>."


class EnvironmentFault(DataError):
    """An environment failed. The sample fails or is masked, and the run continues."""


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        prompt: a text (one user message) or chat messages. Empty for episodes whose first observation comes from ``reset``.
        label: the expected answer, for the report.
    """

    prompt: str | list[dict[str, Any]] = ""
    label: Any = None


#: What the model sees: a text, or a list of texts and pictures. A picture is one of Pillow, or the bytes of an image file.
Observation = str | list[Any]


@dataclass(frozen=True)
class Step:
    """What an environment returns for an answer.

    Attributes:
        text: the next observation.
        reward: the reward of this step.
        done: whether the episode has ended.
    """

    text: Observation
    reward: float
    done: bool


class Episode(ABC):
    """One episode. Methods may block: they are called in threads, one at a time.

    Attributes:
        instructions: system message of this episode, known after ``reset``; empty for the environment's.
    """

    instructions: str = ""

    @abstractmethod
    def reset(self) -> Observation:
        """Start the episode; returns the first observation."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Continue with an answer of the model."""

    def close(self) -> None:
        """Release what the episode holds. Called once, also after an error."""


class Environment(ABC):
    """Tasks by number and difficulty level; the same numbers give the same task.

    Methods may block. ``score`` and the methods of episodes are called in threads, concurrently.

    Attributes:
        length: number of tasks; None for an endless set.
        levels: number of difficulty levels.
        several_turns: whether ``open`` makes episodes; otherwise ``score`` judges single answers.
        scores_groups: ``score`` receives all answers to a prompt at once; otherwise one answer per call, so that an answer that makes it fail costs
            no other sample.
        instructions: system message; empty for none.
        answer: where the answer is in a response, if the entry does not say; see ``Entry``.
    """

    length: int | None = None
    levels: int = 1
    several_turns: bool = False
    scores_groups: bool = False
    instructions: str = ""
    answer: str = "text"

    @abstractmethod
    def task(self, number: int, level: int) -> Task:
        """Return a task."""

    def score(self, number: int, level: int, answers: Sequence[str | None]) -> Sequence[float | dict[str, float]]:
        """Score answers to a task; an answer is None if the response does not contain one.

        Raises:
            NotImplementedError: the environment has episodes.
        """
        raise NotImplementedError

    def open(self, number: int, level: int) -> Episode:
        """Make an episode of a task. Called for each sample.

        Raises:
            NotImplementedError: the environment scores single answers.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what all tasks share. Called at the end of the run."""


def find_answer(text: str, how: str) -> str | None:
    """Return the answer in a response.

    Args:
        text: the response, without reasoning.
        how: ``tag`` is the last ``<answer>``, ``line`` the last line with text, ``number`` the last number, without commas, ``text`` everything.
    """
    if how == "tag":
        found = _TAG.findall(text)
        return found[-1].strip() if found else None
    stripped = text.strip()
    if how == "line":
        return stripped.splitlines()[-1].strip() if stripped else None
    if how == "number":
        numbers = _NUMBER.findall(stripped)
        return numbers[-1].replace(",", "") if numbers else None
    return stripped


def instructions_of(entry: Entry, environment: Environment, episode: Episode | None = None) -> str:
    """Return the system message of an entry's prompts, or of an episode."""
    if entry.instructions is not None:
        return entry.instructions
    how = entry.answer or environment.answer
    own = (episode.instructions if episode else "") or environment.instructions
    return own or (TAG_INSTRUCTIONS if how == "tag" else "")
