"""Names that nobody here has: what to use instead, or how to get them. The table is ``elsewhere.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles_core.config.schema import CORE, Option, Schema
from miles_core.config.value import listing
from miles_core.nearest import did_you_mean
from miles_core.plugin.facts import COMES_WITH

_OFF = ("", "0", "false", "off", "no", "f", "n")
#: Parts that are usually called like the plugin that provides them.
_NAMED_AFTER_PLUGINS = ("engine", "trainer", "runtime", "format")


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def explain_flag(flag: str, schema: Schema) -> str:
    """One sentence about a flag that no installed package declares."""
    spelling = "--" + flag.lstrip("-").replace("_", "-")
    if spelling != flag and spelling in schema.spellings():
        return f"unknown flag {flag}; it is spelt {spelling}"
    for plugin in schema.manifests.values():
        if spelling in plugin.elsewhere:
            return f"{flag} does not exist here: {_instead(plugin.elsewhere[spelling])}"
    for pattern, sentence in _table()["flags"].items():
        if fnmatchcase(spelling, pattern):
            return f"{flag} does not exist here: {sentence}"
    if known := from_elsewhere(flag):
        return known
    if spelling in translations():
        return f"{flag} does not exist here: {_instead(translations()[spelling])}"
    nearest = did_you_mean(flag, schema.spellings(), "; ") or "; miles train --help lists all flags"
    return f"unknown flag {flag}{nearest} (the flags of a plugin exist once it is installed)"


def _instead(table: str | Mapping[str, str]) -> str:
    """What to do without a flag, from a sentence or a table of ``translate``."""
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


def translations() -> dict[str, dict[str, str]]:
    """Flags of other programs -> their tables; see ``translate``."""
    found: dict[str, dict[str, str]] = _table()["translate"]
    return found


def explain_word(word: str) -> str:
    """One sentence about a word that is neither a flag nor a flag's value."""
    known = from_elsewhere(word.partition("=")[0]) if "=" in word else ""
    return known or f"unexpected argument {word!r}; values of a list are separated by commas, without spaces"


def from_elsewhere(name: str) -> str:
    """One sentence about an option of another program, with or without dashes before it; empty for one that is not known."""
    for program, names in others().items():
        for theirs, here in names.items():
            if _plain(theirs) == _plain(name):
                return f"{name} is an option of {program}; here: {here}"
    return ""


def others() -> dict[str, dict[str, str]]:
    """Program -> its options -> what to use here."""
    return {program: table["names"] for program, table in _table()["from"].items()}


def about(program: str) -> str:
    """What ``others`` lists of this program, in a sentence or two."""
    return str(_table()["from"][program]["about"])


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def explain_environment(environment: Mapping[str, str], schema: Schema) -> list[str]:
    """One sentence for each variable that is set, looks like a plugin's, and is read by nobody here: ignored in silence it
    would make another run of this one. A switch that is off asks for nothing."""
    return [
        f"environment variable {name}={value}: no installed plugin reads it; install the one it belongs to, or unset it"
        for name, value in environment.items()
        if name.startswith(tuple(_table()["environment"]))
        and name not in schema.environment
        and value.lower() not in _OFF
    ]


def explain_value(option: Option, value: object, schema: Schema) -> str | None:
    """What to use instead of a value that an option does not take, or where it may come from, when that is known."""
    if not isinstance(value, str):  # a file's list, table or number
        return None
    sentence = _table()["values"].get(option.path, {}).get(value)
    if sentence:
        return f"{option.fact} cannot be {value!r}: {sentence}"
    named = option.owner == CORE and option.info.part in _NAMED_AFTER_PLUGINS and value.isidentifier()
    if named and value not in schema.manifests and not did_you_mean(value, map(str, option.choices)):
        have = f"it is one of {listing(option.choices)}" if option.choices else "nothing provides one"
        return f"{option.fact} cannot be {value!r}; {have}; {COMES_WITH}"
    return None


def explain_plugin(name: str, schema: Schema) -> str:
    """One sentence about a plugin that is asked for and not there."""
    nearest = did_you_mean(name, schema.manifests, "; ")
    return f"no plugin {name!r} is installed{nearest}; `miles plugins` lists those that are"
