"""``file:FILE.py:Class`` or ``file:module:Class``: a user's subclass of ``Environment``.

It is made as ``Class(seed=..., **options)``.
"""

from __future__ import annotations

from miles_core.chat import import_code
from miles_core.plugin import ConfigError
from miles_environments.entry import Entry
from miles_environments.environment import Environment


def make(entry: Entry, seed: int) -> Environment:
    """Make the environment of an entry."""
    where = f"--environments file:{entry.task}"
    path, separator, name = entry.task.rpartition(":")
    if not separator:
        raise ConfigError(f"{where}: it names no class; write file:FILE.py:Class")
    module = import_code(path, "environments", where)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"{where}: {name} is not a subclass of miles_environments.Environment")
    return found(seed=seed, **entry.options)  # type: ignore[call-arg]
