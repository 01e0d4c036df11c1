"""The messages of one sample: the prompt with the tools, answers with calls, and results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from miles_core.data import Renderer
from miles_core.plugin import DataError

#: Written into the system message with ``--tool-prompt text``. The format of calls is that of Hermes 2 Pro.
INSTRUCTIONS = """You can call tools. Their names, descriptions and parameters:
<tools>
{schemas}
</tools>
To call one, write a JSON object with its name and its arguments:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
You then receive its result, and answer or call further tools."""


def first_messages(
    prompt: str | list[dict[str, Any]], schemas: Sequence[Any], mode: str, renderer: Renderer
) -> list[dict[str, Any]]:
    """Return the conversation before the first answer: the prompt's messages and, with ``--tool-prompt text``, the schemas in the system
    message, or before the first message if the template has no such role."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
    if mode != "text":
        return messages
    text = INSTRUCTIONS.format(schemas="\n".join(json.dumps(one["function"], ensure_ascii=False) for one in schemas))
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": _join(first["content"], text)}, *messages[1:]]
    with_system = [{"role": "system", "content": text}, *messages]
    try:
        if text.splitlines()[0] in renderer.text(with_system):
            return with_system
    except DataError:
        pass
    return [{**first, "content": _join(text, first["content"])}, *messages[1:]]


def result_messages(
    names: Sequence[str], ids: Sequence[str], contents: Sequence[str | list[Any]], mode: str
) -> list[dict[str, Any]]:
    """Return the messages with the results of an answer's calls: one per call, or a single user message with ``--tool-prompt text``.
    A content is a text, or parts of which some are images."""
    if mode == "text":
        body: str | list[Any] = ""
        for content in contents:
            wrapped = _join(_join("<tool_response>", content, "\n"), "</tool_response>", "\n")
            body = _join(body, wrapped, "\n") if body else wrapped
        return [{"role": "user", "content": body}]
    return [
        {"role": "tool", "name": name, "tool_call_id": id_, "content": content}
        for name, id_, content in zip(names, ids, contents, strict=True)
    ]


def _join(one: str | list[Any], two: str | list[Any], between: str = "\n\n") -> str | list[Any]:
    """Join two contents of messages, texts or parts."""
    if isinstance(one, str) and isinstance(two, str):
        return f"{one}{between}{two}"
    first, second = ([{"type": "text", "text": c}] if isinstance(c, str) else c for c in (one, two))
    return [*first, {"type": "text", "text": between}, *second]
