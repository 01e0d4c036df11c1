"""Calls in Python syntax: ``[add(a=1, b=2), search(text="x")]`` (Llama 3.2 and 4, Meta's prompt format page; LFM2, between its own tokens).

The answer is parsed, never executed; arguments are literals.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from miles_core.chat.call import SHOWN, Answer, Call, Malformed, make_call

_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_TAGS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
#: The beginning of a list of calls; another text in brackets is no call.
_CALL = re.compile(r"\[\s*[\w.\-]+\s*\(")


def parse(text: str, parameters: Mapping[str, Mapping[str, Any]]) -> Answer:
    """Read the calls of an answer: a list of calls, alone in the answer or between LFM2's tokens."""
    content, tagged, body = text.partition(_BEGIN)
    if tagged:
        body, _, after = body.partition(_END)
        content = f"{content}{after}".strip()
    else:
        content, body = "", text
    marked = bool(tagged) or any(tag in body for tag in _TAGS)
    for tag in _TAGS:
        body = body.replace(tag, "")
    body = body.strip()
    if not (body.startswith("[") if marked else _CALL.match(body)):
        if tagged:
            return Answer(content, [Malformed("the calls must be a list: [f(a=1)]", body[:SHOWN])])
        return Answer(text.strip())
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return Answer(
            content, [Malformed(f"the calls are not valid Python: {getattr(error, 'msg', error)}", body[:SHOWN])]
        )
    if not isinstance(tree, ast.List) or not tree.elts or not all(isinstance(e, ast.Call) for e in tree.elts):
        return Answer(text.strip())  # an ordinary list
    return Answer(content, [_read(e, body) for e in tree.elts if isinstance(e, ast.Call)])


def _read(node: ast.Call, text: str) -> Call | Malformed:
    name = ast.unparse(node.func)
    if node.args:
        return Malformed("arguments must be named: f(a=1)", text[:SHOWN], name)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            return Malformed("arguments cannot be unpacked with **", text[:SHOWN], name)
        try:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, MemoryError, RecursionError):
            return Malformed(f"the argument {keyword.arg} is not a literal", text[:SHOWN], name)
    return make_call(name, arguments, text)
