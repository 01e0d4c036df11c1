"""``gymnasium:ID`` or ``gymnasium:module:Class``: environments with Gymnasium's interface whose observations and actions are texts.

An observation that is a mapping is shown by its entry ``text``, others that are not texts as JSON; with ``render_mode=ansi`` the text of
``render`` is shown instead. The action is the answer as text, or ``to_action(answer)`` if the environment has this method; for discrete actions
it is the last whole number in the answer. A reset draws the task from the seed. Options are arguments of the environment.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from miles_core.plugin import ConfigError
from miles_environments.entry import Entry
from miles_environments.environment import Environment, Episode, Step, Task

#: Seeds are drawn from this range, which numpy's generators take.
SEEDS = 2**31 - 1
#: Longest number that an answer may name as its action; Python does not convert numbers of thousands of digits.
_DIGITS = 18


class GymEpisode(Episode):
    """One episode of an environment made by ``create``."""

    def __init__(self, create: Callable[[], Any], seed: int) -> None:
        self._create, self._seed = create, seed
        self._made: Any = None

    def reset(self) -> str:
        self._made = self._create()
        observation, _ = self._made.reset(seed=self._seed)
        return self._show(observation)

    def step(self, action: str) -> Step:
        convert = getattr(self._made, "to_action", None)
        count = _count(self._made)
        chosen: Any = convert(action) if convert else action
        if convert is None and count is not None:
            last = next(reversed(re.findall(r"-?\d+", action)), "-1")
            chosen = int(last) if len(last) <= _DIGITS else -1
            if not 0 <= chosen < count:
                return Step(f"The action must be a whole number from 0 to {count - 1}.", 0.0, False)
        observation, reward, ended, truncated, _ = self._made.step(chosen)
        return Step(self._show(observation), float(reward), bool(ended or truncated))

    def close(self) -> None:
        if hasattr(self._made, "close"):
            self._made.close()

    def _show(self, observation: Any) -> str:
        if getattr(self._made, "render_mode", None) == "ansi":
            return str(self._made.render())
        return to_text(observation)


def _count(made: Any) -> int | None:
    """Return the number of discrete actions; None for other spaces of actions."""
    space = getattr(made, "action_space", None)
    return int(getattr(space, "n")) if type(space).__name__ == "Discrete" else None  # noqa: B009 - the library may be absent


class GymEnvironment(Environment):
    """Endless episodes by seed; ``levels`` of the class and an argument ``level`` make difficulty levels."""

    several_turns = True

    def __init__(self, entry: Entry, seed: int) -> None:
        self.seed, self.options = seed, dict(entry.options)
        self._create = self._find(entry)
        self.levels = int(getattr(self._create, "levels", 1))
        self.instructions = str(getattr(self._create, "instructions", ""))
        self._check_actions(entry)

    def _find(self, entry: Entry) -> Callable[..., Any]:
        module, separator, name = entry.task.rpartition(":")
        if separator and not module.endswith("-v"):
            found = getattr(importlib.import_module(module), name, None)
            if not callable(found):
                raise ConfigError(f"--environments gymnasium:{entry.task}: the module {module} has no class {name!r}")
            return found  # type: ignore[no-any-return]
        import gymnasium

        gymnasium.spec(entry.task)  # raises for an unknown id
        return lambda **options: gymnasium.make(entry.task, **options)

    def _check_actions(self, entry: Entry) -> None:
        made = self._create(**self.options)
        space = getattr(made, "action_space", None)
        if hasattr(made, "close"):
            made.close()
        if space is not None and type(space).__name__ not in ("Text", "Discrete") and not hasattr(made, "to_action"):
            raise ConfigError(
                f"--environments gymnasium:{entry.task}: its actions are {space!r:.80}, and an answer is a text; wrap it in a class with "
                "to_action(answer)"
            )

    def task(self, number: int, level: int) -> Task:
        return Task()

    def open(self, number: int, level: int) -> GymEpisode:
        options = self.options | ({"level": level} if self.levels > 1 else {})
        return GymEpisode(lambda: self._create(**options), (self.seed * 1_000_003 + number) % SEEDS)


def to_text(observation: Any) -> str:
    """Return an observation as text."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping) and isinstance(observation.get("text"), str):
        return str(observation["text"])
    if hasattr(observation, "tolist"):
        observation = observation.tolist()
    return json.dumps(observation, ensure_ascii=False, default=str)


def make(entry: Entry, seed: int) -> GymEnvironment:
    """Make the environment of an entry."""
    return GymEnvironment(entry, seed)
