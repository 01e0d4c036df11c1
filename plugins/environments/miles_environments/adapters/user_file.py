"""``file:FILE.py:Class`` or ``file:module:Class``: a user's subclass of ``Environment``.

It is made as ``Class(seed=..., **options)``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from miles_core.plugin import ConfigError
from miles_environments.entry import Entry
from miles_environments.environment import Environment


def make(entry: Entry, seed: int) -> Environment:
    """Make the environment of an entry."""
    where = f"--environments file:{entry.task}"
    path, separator, name = entry.task.rpartition(":")
    if not separator:
        raise ConfigError(f"{where}: it names no class; write file:FILE.py:Class")
    module = _import_file(Path(path).expanduser(), where) if path.endswith(".py") else importlib.import_module(path)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"{where}: {name} is no subclass of miles_environments.Environment")
    return found(seed=seed, **entry.options)  # type: ignore[call-arg]


def _import_file(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{where}: there is no file {path}")
    name = f"miles_environment_of_users_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None  # a .py file
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(f"{where}: importing it raised {type(error).__name__}: {error}") from error
    return module
