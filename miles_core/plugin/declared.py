"""Is a manifest what the dataclass says? Looked at when it is read, so that a slip is a sentence with the plugin's name."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.plugin.manifest import Plugin, Rule

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: The kinds of parts that core and its backends ask for; plugins may have more among themselves.
PARTS = (
    "runtime",
    "model",
    "trainer",
    "engine",
    "decoder",
    "transport",
    "schedule",
    "advantage",
    "reward",
    "check",
    "report",
    "record",
)


def mistakes(plugin: Plugin) -> Iterator[str]:
    """What is wrong with the types, names and reasons in a manifest, one sentence each."""
    hints = typing.get_type_hints(Plugin)
    wrong = False
    for entry in dataclasses.fields(Plugin):
        value = getattr(plugin, entry.name)
        if not _fits(value, hints[entry.name]):
            wrong = True
            comma = "; a tuple of one needs a comma: (x,)" if typing.get_origin(hints[entry.name]) is tuple else ""
            yield f"its {entry.name} is {value!r:.80}, and must be {_words(hints[entry.name])}{comma}"
    if wrong:
        return
    if not NAME.fullmatch(plugin.name):
        yield f"its name {plugin.name!r} must be letters, digits and _"
    for kind in plugin.provides:
        if kind not in PARTS and (near := difflib.get_close_matches(kind, PARTS, 1, 0.8)):
            yield f"it provides {kind!r}, which nobody asks for; did you mean {near[0]}?"
    if plugin.standard and (
        plugin.hooks or plugin.config or plugin.requires or plugin.claims or plugin.sets or plugin.pairs
    ):
        yield "it is standard, so no plan lists it, but it has hooks, options, rules, claims, sets or pairs"
    rules: list[Rule] = [
        *plugin.requires,
        *plugin.recommends,
        *(r for p in plugin.pairs for r in (*p.rules, *p.recommends)),
    ]
    reasons = [(f"the rule {rule.needs!r}", rule.because) for rule in rules]
    reasons += [(f"the claim {slot!r}", because) for slot, because in plugin.claims.items()]
    reasons += [(f"the use of {name!r}", because) for name, because in plugin.uses.items()]
    for what, because in reasons:
        if not because.strip():
            yield f"{what} has no reason; a user who is refused reads it"


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type that an annotation of the manifest names."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        key, each = arguments
        return isinstance(value, Mapping) and all(_fits(k, key) and _fits(v, each) for k, v in value.items())
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    """The type as people write it: ``tuple of Rule``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if origin is tuple:
        return f"tuple of {_words(arguments[0])}"
    if origin is not None:
        return f"mapping of {_words(arguments[0])} to {_words(arguments[1])}"
    return "None" if hint is type(None) else str(getattr(hint, "__name__", hint))
