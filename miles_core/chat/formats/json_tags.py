"""Hermes and Qwen: each call is a JSON object between ``<tool_call>`` and ``</tool_call>``.

``{"name": "add", "arguments": {"a": 1}}``. The format is documented in the model card of Hermes-2-Pro and in the chat template of Qwen2.5.
A call that the model did not close is read to the end of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from miles_core.chat.call import SHOWN, Answer, Call, Malformed, load_json, make_call

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def parse(text: str, parameters: Mapping[str, Mapping[str, Any]]) -> Answer:
    """Read the calls of an answer."""
    return Answer(_CALL.sub("", text).strip(), [read_object(found[1]) for found in _CALL.finditer(text)])


def read_object(text: str) -> Call | Malformed:
    """Read one call: a JSON object with ``name`` and ``arguments`` (or ``parameters``)."""
    try:
        value = load_json(text.strip())
    except ValueError as error:
        return Malformed(f"the call is not valid JSON: {error}", text[:SHOWN])
    return to_call(value, text)


def to_call(value: Any, text: str) -> Call | Malformed:
    """Convert a parsed JSON value with ``name`` and ``arguments`` (or ``parameters``) to a call."""
    if not isinstance(value, Mapping):
        return Malformed('the call must be a JSON object with "name" and "arguments"', text[:SHOWN])
    if isinstance(value.get("function"), Mapping):  # the form of the OpenAI interface
        value = value["function"]
    return make_call(value.get("name"), value.get("arguments", value.get("parameters")), text)
