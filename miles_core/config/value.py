"""From what was typed or written in a file to a checked value, with one sentence when it cannot be.

Types are pydantic's business (loaded on first use: it costs more than everything else here); choices, bounds and the
words of the message are ours.
"""

from __future__ import annotations

import json
import math
import os
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from miles_core.config.schema import Option
from miles_core.errors import ConfigError
from miles_core.nearest import did_you_mean

NONE = "none"  # what to type for "no value" where a value is optional


def check(option: Option, raw: Any, origin: str) -> Any:
    """``raw`` (text of a flag, or a file's value) as a value of the option's type.

    Raises:
        ConfigError: what was given, where, and what is allowed.
    """
    if option.optional and (raw is None or (isinstance(raw, str) and raw.lower() == NONE)):
        return None
    if option.is_list and isinstance(raw, (str, list, tuple)) and [*([raw] if isinstance(raw, str) else raw)] == [NONE]:
        return ()
    if isinstance(raw, Mapping):
        raw = _named(option, raw)
    if option.is_list:
        raw = as_list(raw)
    if isinstance(raw, (str, os.PathLike)) and option.is_path:
        raw = os.path.expanduser(raw)
        if why := _no_path(raw):
            raise ConfigError(f"{origin}: {option.fact} {why}")
    value = _typed(option, raw, origin)
    if value == option.default:  # also where it is outside of the choices: nothing, for what another program chooses
        return value
    items = value if option.is_list else (value,)
    for item in items:
        if option.choices and item not in option.choices:
            hint = did_you_mean(str(item), map(str, option.choices), "; ")
            raise ConfigError(
                f"{origin}: {option.fact} cannot be {item!r}; it is one of {listing(option.choices)}{hint}"
            )
        if isinstance(item, int) and abs(item) >= 2**63:
            raise ConfigError(f"{origin}: {option.fact} cannot be {item}; it must be below 2**63")
        if isinstance(item, (int, float)) and not _within(option, item):
            raise ConfigError(f"{origin}: {option.fact} cannot be {item:g}; it must be {option.info.bounds()}")
    return value


def _no_path(path: str) -> str:
    """Why this can name no file or directory on any disk; empty where it can."""
    if not path:
        return "is empty; leave the option out, or name a file or directory (. is this one)"
    if "\0" in path:
        return f"cannot be {path!r}; no name holds a NUL character"
    longest = max(path.split("/"), key=lambda part: len(os.fsencode(part)))
    if len(os.fsencode(longest)) > 255:
        return f"holds a name of {len(os.fsencode(longest))} bytes ({longest[:40]}...); file systems end at 255"
    return ""


def _named(option: Option, raw: Mapping[Any, Any]) -> Any:
    """A file's table where a value is wanted: ``{name: file}`` for an option that takes NAME=FILE, or one file."""
    if option.is_list and "=" in option.info.metavar:
        return [f"{name}={item}" for name, item in raw.items()]
    if option.is_path and not option.is_list and len(raw) == 1:
        return next(iter(raw.values()))
    return raw


def listing(values: tuple[Any, ...]) -> str:
    """``a, b or c``."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def kind(option: Option) -> str:
    """The type in words: ``"a whole number"``."""
    inner = option.inner
    if inner is bool:
        return "true or false"
    if inner is int:
        return "a whole number"
    if inner is float:
        return "a number"
    if option.is_list:
        items = {int: "whole numbers", float: "numbers"}.get(typing.get_args(option.inner)[0], "texts")
        return f"{items}, separated by commas,"
    return "a text"


def as_list(raw: Any) -> list[Any]:
    """A typed text as items: split at commas, or a JSON list where items hold commas; a file's list as it is."""
    if not isinstance(raw, str):
        return list(raw) if isinstance(raw, (list, tuple)) else [raw]
    if raw.lstrip().startswith("["):
        try:
            return list(json.loads(raw))
        except ValueError:  # not JSON, so the bracket is text like any other
            pass
    return [piece for piece in raw.split(",") if piece]


def _typed(option: Option, raw: Any, origin: str) -> Any:
    from pydantic import ValidationError

    wrong_bool = isinstance(raw, bool) and option.inner in (int, float, str)
    if not wrong_bool:
        try:
            value = _adapter(option.inner).validate_python(raw)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{origin}: {option.fact} cannot be {raw}; it must be a finite number")
            return value
        except ValidationError:
            pass  # pydantic's words name types and codes; ours name what the user typed and may type
    if option.choices:
        hint = did_you_mean(str(raw), map(str, option.choices), "; ")
        raise ConfigError(f"{origin}: {option.fact} cannot be {raw!r}; it is one of {listing(option.choices)}{hint}")
    shown = ",".join(map(str, raw)) if option.is_list else raw
    must = f"{kind(option)} {option.info.bounds()}".strip(" ,")
    raise ConfigError(f"{origin}: {option.fact} cannot be {shown!r}; it must be {must}")


@cache
def _adapter(annotation: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(annotation, config=ConfigDict(coerce_numbers_to_str=True))


def _within(option: Option, value: float) -> bool:
    info = option.info
    return not (
        (info.gt is not None and value <= info.gt)
        or (info.ge is not None and value < info.ge)
        or (info.lt is not None and value >= info.lt)
        or (info.le is not None and value > info.le)
    )
