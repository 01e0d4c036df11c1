"""``openenv:URL``: a server with OpenEnv's interface (github.com/meta-pytorch/OpenEnv), by its generic client.

``action=message`` names the field of an action that the answer fills; ``observation=message`` the field of an observation that the model
reads (default: ``text``, ``message``, ``output``, ``prompt`` or ``result``, whichever is there, else the observation as JSON). ``fields`` in
a configuration file adds constant fields to each action.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from miles_environments.adapters.gymnasium_text import SEEDS
from miles_environments.entry import Entry
from miles_environments.environment import Environment, Episode, Step, Task
from miles_environments.libraries import check_options

_USUAL = ("text", "message", "output", "prompt", "result")


class OpenEpisode(Episode):
    """One session with the server."""

    def __init__(self, url: str, options: Mapping[str, Any], seed: int) -> None:
        self._url, self._options, self._seed = url, options, seed
        self._client: Any = None

    def reset(self) -> str:
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=self._url).sync()
        self._client.connect()
        return self._show(self._client.reset(seed=self._seed).observation)

    def step(self, action: str) -> Step:
        fields = {**dict(self._options.get("fields", {})), str(self._options.get("action", "message")): action}
        result = self._client.step(fields)
        return Step(self._show(result.observation), float(result.reward or 0.0), bool(result.done))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _show(self, observation: Any) -> str:
        if not isinstance(observation, Mapping):
            return str(observation)
        chosen = self._options.get("observation")
        names = (str(chosen),) if chosen else _USUAL
        found = next((observation[name] for name in names if name in observation), observation)
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)


class OpenEnvironment(Environment):
    """Endless sessions by seed."""

    several_turns = True

    def __init__(self, entry: Entry, seed: int) -> None:
        import openenv.core.generic_client  # noqa: F401 - a missing library is reported before the run

        check_options(entry.options, ("action", "observation", "fields"), f"openenv:{entry.task}")
        self.url, self.options, self.seed = entry.task, dict(entry.options), seed

    def task(self, number: int, level: int) -> Task:
        return Task()

    def open(self, number: int, level: int) -> OpenEpisode:
        return OpenEpisode(self.url, self.options, (self.seed * 1_000_003 + number) % SEEDS)


def make(entry: Entry, seed: int) -> OpenEnvironment:
    """Make the environment of an entry."""
    return OpenEnvironment(entry, seed)
