"""Names that core does not have: who owns them, or what to use instead. The table is ``elsewhere.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles_core.config.schema import Option, Schema
from miles_core.nearest import did_you_mean

_OFF = ("", "0", "false", "off", "no", "f", "n")


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def known_plugins() -> tuple[str, ...]:
    """The plugins of this project, installed or not."""
    return tuple(_table()["plugins"])


def pip_command(plugin: str) -> str:
    return f"pip install miles-plugin-{plugin.replace('_', '-')}"


def _owner(flag: str) -> str | None:
    for plugin, patterns in _table()["plugins"].items():
        if any(fnmatchcase(flag, pattern) for pattern in patterns):
            return str(plugin)
    return None


def explain_flag(flag: str, schema: Schema) -> str:
    """One sentence about a flag that no installed package declares."""
    spelling = "--" + flag.lstrip("-").replace("_", "-")
    if spelling != flag and spelling in schema.spellings():
        return f"unknown flag {flag}; it is spelt {spelling}"
    for pattern, sentence in _table()["flags"].items():
        if fnmatchcase(spelling, pattern):
            return f"{flag} does not exist here: {sentence}"
    owner = _owner(spelling)
    nearest = did_you_mean(flag, schema.spellings(), "; ")
    if owner is not None and owner not in schema.manifests:
        return f"{flag} belongs to the plugin {owner}, which is not installed: {pip_command(owner)}{nearest}"
    return f"unknown flag {flag}{nearest or '; miles train --help lists all flags'}"


def explain_environment(environment: Mapping[str, str], schema: Schema) -> list[str]:
    """One sentence for each variable that is set and belongs to a plugin that is not installed: ignored in silence it
    would make another run of this one. A switch that is off asks for nothing."""
    return [
        f"environment variable {name}={environment[name]}: it belongs to the plugin {plugin}, which is not installed: "
        f"{pip_command(plugin)}, or unset it"
        for plugin, names in _table()["environment"].items()
        for name in names
        if plugin not in schema.manifests and environment.get(name, "").lower() not in _OFF
    ]


def explain_value(option: Option, value: object, schema: Schema) -> str | None:
    """What to use instead of a value that an option does not take, when that is known."""
    sentence = _table()["values"].get(option.path, {}).get(value)
    if sentence:
        return f"{option.fact} cannot be {value!r}: {sentence}"
    if option.info.part and value in known_plugins() and value not in schema.manifests:
        return (
            f"{option.fact} cannot be {value!r} yet: the plugin {value} provides it and is not installed: "
            f"{pip_command(str(value))}"
        )
    return None


def explain_plugin(name: str, schema: Schema) -> str:
    """One sentence about a plugin that is asked for and not there."""
    if name in known_plugins():
        return f"the plugin {name} is not installed: {pip_command(name)}"
    close = did_you_mean(name, (*schema.manifests, *known_plugins()), "; ")
    return f"there is no plugin {name!r}{close}; `miles plugins` lists those installed"
