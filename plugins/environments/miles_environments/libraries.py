"""Makes the environment of an entry: one adapter per library, imported when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from miles_core.plugin import ConfigError
from miles_environments.entry import Entry
from miles_environments.environment import Environment

#: Library -> (module of the adapter, package to install).
_ADAPTERS = {
    "reasoning_gym": ("miles_environments.adapters.reasoning", "reasoning-gym"),
    "verifiers": ("miles_environments.adapters.tasksets", "verifiers"),
    "gymnasium": ("miles_environments.adapters.gymnasium_text", "gymnasium"),
    "textarena": ("miles_environments.adapters.arena", "textarena"),
    "openenv": ("miles_environments.adapters.open_env", "openenv"),
    "nemo_gym": ("miles_environments.adapters.nemo_gym", ""),
    "harbor": ("miles_environments.adapters.harbor_tasks", ""),
    "file": ("miles_environments.adapters.user_file", ""),
}


def make_environment(entry: Entry, seed: int) -> Environment:
    """Make the environment of an entry.

    Args:
        entry: the entry.
        seed: seed of its tasks; held-out tasks have another one.

    Raises:
        ConfigError: the library is not installed, or refuses the task or an option.
    """
    module, package = _ADAPTERS[entry.library]
    where = f"--environments {entry.library}:{entry.task}"
    adapter = importlib.import_module(module)
    try:
        made: Environment = adapter.make(entry, seed)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        if package and (error.name or "").partition(".")[0] in (package, package.replace("-", "_")):
            raise ConfigError(f"{where}: the library is not installed; pip install {package}") from error
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{where}: the library refuses it ({type(error).__name__}: {error})".rstrip()) from error
    if entry.level >= made.levels:
        raise ConfigError(f"{where}: level is {entry.level}, and it has {made.levels} (from 0)")
    if entry.curriculum and made.levels == 1:
        raise ConfigError(f"{where}: it has no difficulty levels, so no curriculum; leave curriculum out")
    return made


def check_options(options: Any, known: tuple[str, ...], where: str) -> None:
    """Raise ConfigError if an adapter does not know an option."""
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ConfigError(f"{where} has no option {unknown[0]!r}; its options are: {', '.join(known) or 'none'}")
