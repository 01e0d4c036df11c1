"""Explain unknown names: name the option to use instead, or the plugin that provides it. The table is ``foreign_flags.toml``; a part knows the
options of other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles_core.config.schema import CORE, Option, Schema
from miles_core.config.value import format_choices
from miles_core.nearest import did_you_mean
from miles_core.plugin.facts import COMES_WITH
from miles_core.plugin.load import find_part

#: The part of a message that precedes what to use instead of a flag.
ELSEWHERE = " does not exist here: "
_OFF = ("", "0", "false", "off", "no", "f", "n")
#: Prefixes of environment variables that set options of plugins.
_ENVIRONMENT = ("OPEN_TRAINING_",)
#: Kinds of parts that usually have the name of the plugin that provides them.
_NAMED_AFTER_PLUGINS = ("engine", "trainer", "runtime", "format")


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    import tomllib

    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def explain_flag(flag: str, schema: Schema, own: Sequence[str] = ()) -> str:
    """Return an error message for a flag that no installed package declares. own: the command's own flags."""
    spelling = "--" + flag.lstrip("-").replace("_", "-")
    if spelling != flag and spelling in schema.spellings():
        return f"unknown flag {flag}; it is spelt {spelling}"
    for plugin in schema.manifests.values():
        if spelling in plugin.foreign_flags:
            return f"{flag}{ELSEWHERE}{_describe_replacement(plugin.foreign_flags[spelling])}"
    for pattern, sentence in _table()["flags"].items():
        if fnmatchcase(spelling, pattern):
            return f"{flag}{ELSEWHERE}{sentence}"
    if known := _explain_foreign(flag, schema):
        return known
    nearest = _name_key(spelling, schema) or did_you_mean(flag, [*schema.spellings(), *own], "; ")
    nearest = nearest or "; miles train --help lists all flags"
    return f"unknown flag {flag}{nearest} (the flags of a plugin exist once it is installed)"


def _name_key(spelling: str, schema: Schema) -> str:
    """Return the flags of the options whose key in a file is spelled like the unknown flag: ``; did you mean ...?``, or an empty string."""
    key = spelling.lstrip("-").replace("-", "_")
    found = [f"{option.flag} ({path} in files)" for path, option in schema.options.items() if path.endswith(f".{key}")]
    return f"; did you mean {' or '.join(found)}?" if 0 < len(found) <= 3 else ""


def _describe_replacement(table: str | Mapping[str, str]) -> str:
    """Describe what to use instead of a flag, from a sentence or a table of ``translate``."""
    if isinstance(table, str):
        return table
    ways = [
        f"{f'with {pattern}: ' * (len(table) > 1)}{'give ' + here if here else 'drop it'}"
        for pattern, here in table.items()
    ]
    return (
        "; ".join(dict.fromkeys(ways))
        .replace("{0}", "NAME")
        .replace("{1}", "FILE")
        .replace("{list}", "N,...")
        .replace("{}", "VALUE")
    )


def explain_word(word: str) -> str:
    """Return an error message for a word that is neither a flag nor a flag's value."""
    known = _explain_foreign(word.partition("=")[0]) if "=" in word else ""
    return known or f"unexpected argument {word!r}; values of a list are separated by commas, without spaces"


def _explain_foreign(name: str, schema: Schema | None = None) -> str:
    """Return an error message for an option of another program or a path in place of a flag; empty for other names."""
    explain = find_part("correction", "foreign_option")
    return str(explain(name, schema)) if explain else ""


def explain_environment(environment: Mapping[str, str], schema: Schema) -> list[str]:
    """Return one error message per environment variable that looks like a plugin's option but that no installed plugin reads.

    Ignoring such a variable silently would change the run. Variables with a value that means "off" are accepted.
    """
    return [
        f"environment variable {name}={value}: no installed plugin reads it; install the one it belongs to, or unset it"
        for name, value in environment.items()
        if name.startswith(_ENVIRONMENT) and name not in schema.environment and value.lower() not in _OFF
    ]


def explain_value(option: Option, value: object, schema: Schema) -> str | None:
    """Return an error message for an invalid value: what to use instead, or which plugin provides it. None if neither is known."""
    if not isinstance(value, str):  # a list, table or number of a file
        return None
    sentence = _table()["values"].get(option.path, {}).get(value)
    if sentence:
        return f"{option.fact} cannot be {value!r}: {sentence}"
    named = option.owner == CORE and option.info.part in _NAMED_AFTER_PLUGINS and value.isidentifier()
    if named and value not in schema.manifests and not did_you_mean(value, map(str, option.choices)):
        have = f"it is one of {format_choices(option.choices)}" if option.choices else "nothing provides one"
        return f"{option.fact} cannot be {value!r}; {have}; {COMES_WITH}"
    return None


def explain_plugin(name: str, schema: Schema) -> str:
    """Return an error message for a requested plugin that is not installed."""
    words = name.replace(";", " ").split()
    if len(words) > 1 and all(word in schema.manifests for word in words):
        return f"no plugin is named {name!r}; separate plugins by commas: {','.join(words)}"
    nearest = did_you_mean(name, [other for other, plugin in schema.manifests.items() if not plugin.standard], "; ")
    package = f"miles-plugin-{name.replace('_', '-')}"
    return f"no plugin {name!r} is installed{nearest}; `miles plugins` lists those that are; its package is usually named {package}"
