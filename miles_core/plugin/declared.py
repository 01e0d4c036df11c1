"""Validate a manifest when it is loaded, so that mistakes produce error messages that name the plugin."""

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
#: The types of a manifest's fields.
_HINTS = typing.get_type_hints(Plugin)
#: The kinds of parts that core and its backends use. Plugins may define further kinds.
PARTS = (
    *("runtime", "model", "head", "trainer", "optimizer", "engine", "decoder", "transport", "schedule", "prompts"),
    *("generate", "advantage", "reward", "check", "report", "record", "progress", "sink", "samples", "help"),
)


def find_mistakes(plugin: Plugin) -> Iterator[str]:
    """Yield an error message for each wrong type, invalid name and missing reason in a manifest."""
    wrong = False
    for entry in dataclasses.fields(Plugin):
        value = getattr(plugin, entry.name)
        if not _fits(value, _HINTS[entry.name]):
            wrong = True
            comma = "; a tuple of one needs a comma: (x,)" if typing.get_origin(_HINTS[entry.name]) is tuple else ""
            yield f"its {entry.name} is {value!r:.80}, and must be {_describe_type(_HINTS[entry.name])}{comma}"
    if wrong:
        return
    if not NAME.fullmatch(plugin.name):
        yield f"its name {plugin.name!r} must be letters, digits and _"
    for kind in plugin.provides:
        if kind not in PARTS and (near := difflib.get_close_matches(kind, PARTS, 1, 0.8)):
            yield f"it provides {kind!r}, which core does not use; did you mean {near[0]}?"
    if plugin.standard and (plugin.hooks or plugin.requires or plugin.claims or plugin.sets or plugin.pairs):
        yield "it is standard, so no plan lists it, but it has hooks, rules, claims, sets or pairs"
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
            yield f"{what} has no reason; error messages show it to users"


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of an annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        key_hint, value_hint = arguments
        return isinstance(value, Mapping) and all(_fits(k, key_hint) and _fits(v, value_hint) for k, v in value.items())
    return isinstance(value, hint)


def _describe_type(hint: Any) -> str:
    """Describe a type in words: ``tuple of Rule``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_describe_type, arguments))
    if origin is tuple:
        return f"tuple of {_describe_type(arguments[0])}"
    if origin is not None:
        return f"mapping of {_describe_type(arguments[0])} to {_describe_type(arguments[1])}"
    return "None" if hint is type(None) else str(getattr(hint, "__name__", hint))
