"""Convert raw values of flags and files to checked values.

pydantic checks types. It is imported on first use, because importing it takes longer than the rest of this module. Choices,
bounds and error messages are implemented here.
"""

from __future__ import annotations

import json
import math
import os
import re
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from miles_core.config.schema import Option
from miles_core.errors import ConfigError
from miles_core.nearest import did_you_mean

#: Texts that every reader converts to the same value.
_CERTAIN: dict[Any, re.Pattern[str]] = {
    str: re.compile(r"[ -~]*"),
    int: re.compile(r"-?[0-9]{1,18}"),
    float: re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?|-?\.[0-9]{1,30}"),
}
NONE = "none"  # clears an optional value


def check(option: Option, raw: Any, origin: str) -> Any:
    """Convert ``raw`` (the text of a flag, or a value of a file) to the option's type and check it.

    Raises:
        ConfigError: the value is invalid; names the value, its origin and the allowed values.
    """
    if option.optional and (raw is None or (isinstance(raw, str) and raw.lower() == NONE)):
        return None
    if raw is None:
        raise ConfigError(
            f"{origin}: {option.fact} has no value; write {_describe_allowed(option)}, or leave it out for its default"
        )
    if option.is_list and isinstance(raw, (str, list, tuple)) and [*([raw] if isinstance(raw, str) else raw)] == [NONE]:
        return ()
    if isinstance(raw, Mapping):
        raw = _convert_table(option, raw)
    if option.is_list:
        raw = as_list(raw)
    if isinstance(raw, (str, os.PathLike)) and option.is_path:
        raw = os.path.expanduser(raw)
        if why := _explain_invalid_path(raw):
            raise ConfigError(f"{origin}: {option.fact} {why}")
    if isinstance(raw, str) and raw not in option.choices:  # DEBUG is debug
        raw = next((choice for choice in option.choices if str(choice).lower() == raw.lower()), raw)
    value = _convert(option, raw, origin)
    if value == option.default:  # always valid, even if it is not one of the choices
        return value
    items = value if option.is_list else (value,)
    for item in items:
        if option.choices and item not in option.choices:
            hint = did_you_mean(str(item), map(str, option.choices), "; ")
            raise ConfigError(
                f"{origin}: {option.fact} cannot be {item!r}; it is one of {format_choices(option.choices)}{hint}"
            )
        if isinstance(item, int) and abs(item) >= 2**63:
            raise ConfigError(f"{origin}: {option.fact} cannot be {item}; it must be below 2**63")
        if isinstance(item, (int, float)) and not _within(option, item):
            raise ConfigError(f"{origin}: {option.fact} cannot be {item:g}; it must be {option.info.bounds()}")
    return value


def _explain_invalid_path(path: str) -> str:
    """Return why ``path`` is not a valid path on any file system; empty if it is valid."""
    if not path:
        return "is empty; leave the option out, or name a file or directory (. is this one)"
    if "\0" in path:
        return f"cannot be {path!r}; a path cannot contain a NUL character"
    longest = max(path.split("/"), key=lambda part: len(os.fsencode(part)))
    if len(os.fsencode(longest)) > 255:
        return f"holds a name of {len(os.fsencode(longest))} bytes ({longest[:40]}...); file systems allow 255"
    return ""


def _convert_table(option: Option, raw: Mapping[Any, Any]) -> Any:
    """Convert a table in a file to an option's value: ``{name: file}`` becomes a list of NAME=FILE, or a single file."""
    if option.is_list and "=" in option.info.metavar:
        return [f"{name}={item}" for name, item in raw.items()]
    if option.is_path and not option.is_list and len(raw) == 1:
        return next(iter(raw.values()))
    return raw


def format_choices(values: tuple[Any, ...]) -> str:
    """Format values as ``a, b or c``."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def describe_type(option: Option) -> str:
    """Describe the option's type: ``"a whole number"``."""
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


def _describe_allowed(option: Option) -> str:
    """Describe the values that the option accepts: ``"a number >= 0"``."""
    if option.choices:
        return f"one of {format_choices(option.choices)}"
    return f"{describe_type(option)} {option.info.bounds()}".strip(" ,")


def as_list(raw: Any) -> list[Any]:
    """Convert a raw value to a list. Text is split at commas or, if it is a JSON list, parsed; lists of files are unchanged."""
    if not isinstance(raw, str):
        return list(raw) if isinstance(raw, (list, tuple)) else [raw]
    if raw.lstrip().startswith("["):
        try:
            return list(json.loads(raw))
        except ValueError:  # not JSON, so the bracket is ordinary text
            pass
    return [piece for piece in raw.split(",") if piece]


def _convert(option: Option, raw: Any, origin: str) -> Any:
    if (plain := _convert_plain(option.inner, raw)) is not None:
        return plain
    from pydantic import ValidationError

    wrong_bool = isinstance(raw, bool) and option.inner in (int, float, str)
    if not wrong_bool:
        try:
            value = _adapter(option.inner).validate_python(raw)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{origin}: {option.fact} cannot be {raw}; it must be a finite number")
            return value
        except ValidationError:
            pass  # not pydantic's message: ours names the value as typed and the allowed values
    if option.choices:
        hint = did_you_mean(str(raw), map(str, option.choices), "; ")
        raise ConfigError(
            f"{origin}: {option.fact} cannot be {raw!r}; it is one of {format_choices(option.choices)}{hint}"
        )
    shown = ",".join(map(str, raw)) if option.is_list else raw
    raise ConfigError(f"{origin}: {option.fact} cannot be {shown!r}; it must be {_describe_allowed(option)}")


def _convert_plain(kind: Any, raw: Any) -> Any:
    """Convert a raw value whose meaning is certain, without pydantic, whose import takes as long as a third of a plan; None if it is not."""
    if typing.get_origin(kind) is tuple and isinstance(raw, list):
        items = [_convert_plain(typing.get_args(kind)[0], item) for item in raw]
        return None if None in items else tuple(items)
    if isinstance(raw, str):
        chosen = typing.get_origin(kind) is typing.Literal and raw in typing.get_args(kind)
        certain = kind in _CERTAIN and _CERTAIN[kind].fullmatch(raw)
        return raw if chosen else kind(raw) if certain else None
    return raw if type(raw) is kind and raw == raw and abs(raw) != math.inf else None


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
