"""JSON schemas of Python functions, from type hints and docstrings.

The schema has the form that chat templates take: ``{"type": "function", "function": {"name", "description", "parameters"}}``. Types are
converted by pydantic; descriptions come from the docstring, whose arguments may be written in the style of Google (``Args:``), NumPy
(``Parameters`` underlined) or Sphinx (``:param x:``).
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from miles_core.plugin import ConfigError

_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns?|Yields|Raises|Examples?|Notes?)\s*:?\s*$")
_GOOGLE = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_NUMPY = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?::.*)?$")
_SPHINX = re.compile(r"^\s*:param\s+(?:[\w.\[\], |]+\s+)?(\w+)\s*:\s*(.*)$")


def make_schema(function: Callable[..., Any], name: str, where: str) -> dict[str, Any]:
    """Return the schema of a function.

    Args:
        function: a function, or a bound method.
        name: name of the tool.
        where: ``file:name``, for messages.

    Raises:
        ConfigError: the function has no docstring, an argument has no type hint, or a type has no JSON schema.
    """
    text = inspect.getdoc(function)
    if not text or not text.strip():
        raise ConfigError(f"the tool {where} has no docstring; the model learns from it what the tool does")
    model = arguments_model(function, name, where)
    try:
        parameters = model.model_json_schema()
    except Exception as error:  # pydantic raises its own errors for types without a schema
        raise ConfigError(
            f"the tool {where}: its arguments have no JSON schema ({_first_line(error)}); use types such as str, int, float, bool, "
            "list, dict, Literal or a dataclass"
        ) from error
    summary, described = read_docstring(text)
    properties = parameters.setdefault("properties", {})
    for argument, description in described.items():
        if argument in properties:
            properties[argument].setdefault("description", description)
    for entry in (parameters, *properties.values()):
        entry.pop("title", None)
    parameters.setdefault("required", [])
    parameters.pop("additionalProperties", None)
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def arguments_model(function: Callable[..., Any], name: str, where: str) -> Any:
    """Return a pydantic model with one field per argument of a function, which converts and checks the arguments of calls.

    Raises:
        ConfigError: an argument has no type hint, or cannot be passed by name.
    """
    from pydantic import ConfigDict, create_model

    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ConfigError(f"the tool {where}: its type hints cannot be resolved ({_first_line(error)})") from error
    fields: dict[str, Any] = {}
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"the tool {where}: the argument {parameter} cannot be passed by name; give it a name")
        if argument not in hints:
            raise ConfigError(f"the tool {where}: the argument {argument!r} has no type hint; write {argument}: str")
        fields[argument] = (hints[argument], ... if parameter.default is parameter.empty else parameter.default)
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
    except Exception as error:
        raise ConfigError(
            f"the tool {where}: its arguments cannot be checked ({_first_line(error)}); use types such as str, int, float, bool, "
            "list, dict, Literal or a dataclass"
        ) from error


def describe_arguments_error(error: Exception) -> str:
    """Return pydantic's errors about the arguments of a call in one line."""
    problems = getattr(error, "errors", None)
    if problems is None:
        return _first_line(error)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in problems())


def check_schema(schema: Any, where: str) -> dict[str, Any]:
    """Check the parameters of a tool that a server describes; returns them as a JSON schema of an object.

    Raises:
        ConfigError: the value is not the JSON schema of an object.
    """
    if schema is None:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ConfigError(
            f"{where}: its arguments have the schema {schema!r:.120}; a tool takes a JSON schema of an object"
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not all(isinstance(p, (Mapping, bool)) for p in properties.values()):
        raise ConfigError(f"{where}: the properties of its schema are {properties!r:.120}; they map names to schemas")
    required = schema.get("required", [])
    if not isinstance(required, (list, tuple)) or not set(required) <= set(properties):
        raise ConfigError(
            f"{where}: its schema requires {required!r:.80}, and its properties are {', '.join(properties) or 'none'}"
        )
    return {"type": "object", "properties": {}, **schema}


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function, without its sections, and the descriptions of its arguments."""
    lines = inspect.cleandoc(text).splitlines()
    described = {found[1]: found[2].strip() for line in lines if (found := _SPHINX.match(line))}
    end = next((i for i, line in enumerate(lines) if _SECTION.match(line) or line.lstrip().startswith(":")), len(lines))
    for i, line in enumerate(lines):
        section = _SECTION.match(line)
        if section and section[1] in ("Args", "Arguments", "Parameters"):
            underlined = i + 1 < len(lines) and set(lines[i + 1].strip()) == {"-"}
            described |= _read_arguments(lines[i + 1 + underlined :], _NUMPY if underlined else _GOOGLE)
    return "\n".join(lines[:end]).strip(), described


def _read_arguments(lines: list[str], pattern: re.Pattern[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    indent: int | None = None
    for line in lines:
        if _SECTION.match(line) or (line.strip() and set(line.strip()) == {"-"}):
            break
        match = pattern.match(line)
        if match and line.strip() and (indent is None or len(match[1]) == indent):
            indent = len(match[1])
            found[match[2]] = [match[3]] if pattern is _GOOGLE else []
        elif found and line.strip() and len(line) - len(line.lstrip()) > (indent or 0):
            list(found.values())[-1].append(line.strip())
        elif line.strip():
            break
    return {name: " ".join(part for part in parts if part) for name, parts in found.items()}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
