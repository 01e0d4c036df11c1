"""Tool calls as a model writes them: parsed calls, malformed ones, and the rest of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Longest text of a malformed call that is repeated to the model.
SHOWN = 200


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        name: name of the tool.
        arguments: argument name -> value.
    """

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Malformed:
    """Text in the position of a call that cannot be parsed.

    Attributes:
        reason: what is wrong, for the model.
        text: the text.
        name: name of the tool, if it could be read.
    """

    reason: str
    text: str
    name: str = ""


@dataclass(frozen=True)
class Answer:
    """One answer of a model.

    Attributes:
        content: the text outside of reasoning and calls.
        calls: the calls in the order of the text.
        reasoning: the text of the reasoning; empty if there is none.
    """

    content: str
    calls: list[Call | Malformed] = field(default_factory=list)
    reasoning: str = ""


def make_call(name: object, arguments: object, text: str) -> Call | Malformed:
    """Return the call, or what is wrong with it. ``arguments`` is a JSON object, or the text of one."""
    if not isinstance(name, str) or not name.strip():
        return Malformed("the call has no tool name", text[:SHOWN])
    name = name.strip()
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            return Malformed(f"the arguments are not valid JSON: {error}", text[:SHOWN], name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return Malformed(
            f"the arguments are of the type {type(arguments).__name__}; they must be a JSON object", text[:SHOWN], name
        )
    return Call(name, dict(arguments))


def load_json(text: str) -> Any:
    """Parse JSON as specified: NaN and infinities are errors.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or holds a number of thousands of digits.
    """
    return _guard(lambda: _DECODER.decode(text))


def load_first_json(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that begins at ``start``; return it and its end.

    Raises:
        ValueError: see ``load_json``.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    value, end = _guard(lambda: _DECODER.raw_decode(text, start))
    return value, end


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)


def _guard(parse: Any) -> Any:
    try:
        return parse()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def split_reasoning(text: str, open_: bool = False) -> tuple[str, str]:
    """Split an answer at the end of its reasoning; returns (reasoning, rest).

    Args:
        text: the answer.
        open_: whether the generation prompt already opened the reasoning (``<think>``).
    """
    head, end, rest = text.rpartition("</think>")
    if end:
        return head.strip().removeprefix("<think>").strip(), rest
    if open_ or text.lstrip().startswith("<think>"):  # the answer ended inside the reasoning
        return text.strip().removeprefix("<think>").strip(), ""
    return "", text
