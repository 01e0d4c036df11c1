"""``textarena:ID``: games of textarena (github.com/LeonGuertler/TextArena) for one player.

The reward is the one that ``close`` returns at the end. Observations that repeat the whole history are shown without what was shown before.
Options are arguments of ``textarena.make``.
"""

from __future__ import annotations

from typing import Any

from miles_core.plugin import ConfigError
from miles_environments.adapters.gymnasium_text import SEEDS
from miles_environments.entry import Entry
from miles_environments.environment import Environment, Episode, Step, Task


class ArenaEpisode(Episode):
    """One game."""

    def __init__(self, name: str, options: dict[str, Any], seed: int) -> None:
        self._name, self._options, self._seed = name, options, seed
        self._game: Any = None
        self._shown = ""

    def reset(self) -> str:
        import textarena

        self._game = textarena.make(self._name, **self._options)
        self._game.reset(num_players=1, seed=self._seed)
        return self._observe()

    def step(self, action: str) -> Step:
        done, _ = self._game.step(action)
        if not done:
            return Step(self._observe(), 0.0, False)
        rewards, _ = self._game.close()
        return Step("", float((rewards or {}).get(0, 0.0)), True)

    def _observe(self) -> str:
        _, text = self._game.get_observation()
        text = text if isinstance(text, str) else "\n".join(str(part[1]) for part in text)
        new = text[len(self._shown) :] if self._shown and text.startswith(self._shown) else text
        self._shown = text
        return new.strip()


class Arena(Environment):
    """Endless games by seed."""

    several_turns = True

    def __init__(self, entry: Entry, seed: int) -> None:
        import textarena

        self.name, self.options, self.seed = entry.task, dict(entry.options), seed
        game = textarena.make(self.name, **self.options)  # raises for an unknown id
        try:
            game.reset(num_players=1, seed=0)
        except AssertionError as error:
            raise ConfigError(
                f"--environments textarena:{entry.task}: it is not a game for one player ({error}); a rollout function of a plugin can let "
                "policies play against each other"
            ) from error

    def task(self, number: int, level: int) -> Task:
        return Task()

    def open(self, number: int, level: int) -> ArenaEpisode:
        return ArenaEpisode(self.name, self.options, (self.seed * 1_000_003 + number) % SEEDS)


def make(entry: Entry, seed: int) -> Arena:
    """Make the environment of an entry."""
    return Arena(entry, seed)
