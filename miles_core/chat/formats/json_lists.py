"""JSON without closing tags: Mistral (``[TOOL_CALLS]``) and Llama 3 (the answer itself is a call).

Mistral wrote ``[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`` up to the tokenizer version v7 and writes
``[TOOL_CALLS]name[ARGS]{...}`` since v11 (mistral-common). Llama 3.1 writes ``{"name": ..., "parameters": ...}``, optionally after
``<|python_tag|>``, several calls separated by ``;`` (Meta's prompt format page).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from miles_core.chat.call import SHOWN, Answer, Call, Malformed, load_first_json, make_call
from miles_core.chat.formats.json_tags import to_call

_MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.\-/]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
_PYTHON_TAG = "<|python_tag|>"
#: The beginning of an object with a key, or of a list of such objects; a text in brackets is no call.
_OBJECT = re.compile(r"\s*(?:\[\s*)?\{\s*[\"']")


def parse_mistral(text: str, parameters: Mapping[str, Mapping[str, Any]]) -> Answer:
    """Read the calls of an answer of Mistral, in both forms."""
    content, *blocks = text.split(_MISTRAL)
    calls: list[Call | Malformed] = []
    for block in blocks:
        named = _NAMED.match(block)
        try:
            value, _ = load_first_json(block, named.end() if named else 0)
        except ValueError as error:
            name = named[1] if named else ""
            calls.append(Malformed(f"the calls are not valid JSON: {error}", block[:SHOWN], name))
            continue
        if named:
            calls.append(make_call(named[1], value, block))
        else:
            calls += [to_call(one, block) for one in (value if isinstance(value, list) else [value])]
    return Answer(content.strip(), calls)


def parse_llama(text: str, parameters: Mapping[str, Mapping[str, Any]]) -> Answer:
    """Read the calls of an answer of Llama 3. An answer that does not begin with a call has none: JSON inside a text is not a call."""
    content, tagged, calls_text = text.partition(_PYTHON_TAG)
    body = calls_text if tagged else text
    if not (body.lstrip().startswith(("{", "[")) if tagged else _OBJECT.match(body)):
        bad = (
            [Malformed('the call is not valid JSON: it must begin with {"name": ...}', body[:SHOWN])] if tagged else []
        )
        return Answer((content if tagged else text).strip(), [*bad])
    calls: list[Call | Malformed] = []
    at = 0
    while at < len(body) and body[at:].strip(" \n\t;"):
        at += len(body[at:]) - len(body[at:].lstrip(" \n\t;"))
        try:
            value, at = load_first_json(body, at)
        except ValueError as error:
            calls.append(Malformed(f"the call is not valid JSON: {error}", body[at : at + SHOWN]))
            break
        values = value if isinstance(value, list) else [value]
        if not tagged and not all(isinstance(one, Mapping) and "name" in one for one in values):
            return Answer(text.strip())  # an answer in JSON
        calls += [to_call(one, body) for one in values]
    return Answer(content.strip() if tagged else "", calls)
