"""Loads the tools of ``--tools``: functions and classes from files and modules.

A specification is ``FILE.py``, ``FILE.py:NAME``, ``package.module`` or ``package.module:NAME``. Without a name, all public functions that
the file defines are tools. A class is instantiated for each sample, and its public methods are tools that share the instance.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from types import ModuleType
from typing import Any

from miles_core.chat import import_code
from miles_core.plugin import ConfigError
from miles_tool_calls.schema import arguments_model, describe_arguments_error, make_schema

FLAG = "--tools"


@dataclass(frozen=True)
class Function:
    """One tool that is a Python function.

    Attributes:
        name: its name for the model.
        function: the function; for a method the class's function, without instance.
        schema: its JSON schema for the chat template.
        arguments: pydantic model that checks the arguments of calls.
        owner: the class whose instance of the sample it belongs to; None for a plain function.
        is_async: whether calling it returns a coroutine.
        spec: the specification that it was loaded from.
    """

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    arguments: Any
    owner: type | None
    is_async: bool
    spec: str

    def bind(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert the arguments of a call to the types of the function.

        Raises:
            ValueError: an argument is missing, unknown or of a wrong type; the message is for the model.
        """
        from pydantic import ValidationError

        try:
            checked = self.arguments.model_validate(arguments)
        except ValidationError as error:
            raise ValueError(describe_arguments_error(error)) from None
        return {name: getattr(checked, name) for name in checked.model_fields_set}


def load_functions(specs: tuple[str, ...]) -> list[Function]:
    """Load all tools of ``--tools``.

    Raises:
        ConfigError: a file or name does not exist, an import fails, or a function cannot be a tool.
    """
    return [function for spec in specs for function in _load(spec)]


def _load(spec: str) -> list[Function]:
    path, separator, name = spec.rpartition(":")
    path, name = (path, name) if separator else (spec, "")
    module = import_code(path, "tools", f"{FLAG} {spec}")
    if name:
        if not hasattr(module, name):
            known = ", ".join(f.__name__ for f in _public(module)) or "none"
            raise ConfigError(f"{FLAG} {spec}: there is no {name!r}; its functions are: {known}")
        found = [getattr(module, name)]
    else:
        found = _public(module)
        if not found:
            raise ConfigError(
                f"{FLAG} {spec}: it defines no public function; write {spec}:NAME to choose an imported one"
            )
    return [made for one in found for made in _make(one, spec)]


def _public(module: ModuleType) -> list[Any]:
    return [
        value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and not key.startswith("_") and value.__module__ == module.__name__
    ]


def _make(found: Any, spec: str) -> list[Function]:
    if inspect.isclass(found):
        methods = [
            (key, value)
            for key, value in inspect.getmembers(found, inspect.isfunction)
            if not key.startswith("_") and key != "close"
        ]
        if not methods:
            raise ConfigError(f"{FLAG} {spec}: the class {found.__name__} has no public method")
        return [_describe(value, key, spec, found) for key, value in methods]
    if not inspect.isfunction(found):
        raise ConfigError(
            f"{FLAG} {spec}: it is a {type(found).__name__}; a tool is a function, or a class with methods"
        )
    return [_describe(found, found.__name__, spec, None)]


def _describe(function: Callable[..., Any], name: str, spec: str, owner: type | None) -> Function:
    where = f"{name} ({FLAG} {spec})"
    without_instance = _without_first(function) if owner is not None else function
    return Function(
        name,
        function,
        make_schema(without_instance, name, where),
        arguments_model(without_instance, name, where),
        owner,
        inspect.iscoroutinefunction(function),
        spec,
    )


def _without_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in for a method with the signature, hints and docstring of the bound method."""

    def bound(**arguments: Any) -> None:
        """Never called; it has the signature."""

    signature = inspect.signature(function)
    bound.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    bound.__doc__, bound.__module__ = function.__doc__, function.__module__
    bound.__annotations__ = dict(function.__annotations__)
    bound.__wrapped__ = function  # type: ignore[attr-defined]  # names in its hints are looked up in its module
    return bound


def to_text(value: Any, limit: int) -> str:
    """Convert the result of a tool to the text that the model reads, of at most ``limit`` characters.

    A text stays as it is, other values become JSON; NaN and infinities are written as ``NaN`` and ``Infinity``.
    """
    if isinstance(value, str):
        text = value
    elif isinstance(value, float) and not math.isfinite(value):
        text = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError):
            text = str(value)
    return cut(text, limit)


def to_parts(value: Any) -> list[dict[str, Any]] | None:
    """Convert the result of a tool to content parts in OpenAI's form if it holds an image, otherwise return None.

    An image is one of Pillow, or a part ``{"type": "image_url", "image_url": {"url": "data:..."}}``. It is the result itself, or an item of a
    list with texts and other parts.
    """
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not any(map(_is_image, items)):
        return None
    return [_to_part(item) for item in items]


def _is_pillow(value: Any) -> bool:
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


def _is_image(value: Any) -> bool:
    return _is_pillow(value) or (
        isinstance(value, dict) and str(value.get("type", "")).endswith(("image", "image_url"))
    )


def _to_part(value: Any) -> dict[str, Any]:
    if _is_pillow(value):
        buffer = BytesIO()
        value.save(buffer, "PNG")
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"},
        }
    if _is_image(value) or (isinstance(value, dict) and value.get("type") == "text"):
        return dict(value)
    return {"type": "text", "text": to_text(value, sys.maxsize)}


def to_answer(value: Any, limit: int) -> dict[str, Any]:
    """Convert the result of a tool to the arguments of an ``Outcome``: ``text``, and ``parts`` if it holds an image."""
    parts = to_parts(value)
    if parts is None:
        return {"text": to_text(value, limit)}
    return {"text": cut("\n".join(str(part["text"]) for part in parts if "text" in part), limit), "parts": parts}


def cut(text: str, limit: int) -> str:
    """Cut a text to ``limit`` characters, with a note of how many are missing."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[{len(text) - limit} more characters were cut]"
