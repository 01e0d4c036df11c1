"""gpt-oss: messages with a channel and a recipient (the Harmony response format, OpenAI cookbook).

``<|channel|>analysis<|message|>...<|end|>`` is reasoning, ``<|channel|>final<|message|>...`` is the content, and a message to
``functions.NAME`` (``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``) is a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from miles_core.chat.call import Answer, Call, Malformed, make_call

_MESSAGE = re.compile(
    r"(?P<header>(?:(?!<\|message\|>|<\|end\|>|<\|call\|>|<\|return\|>).)*)<\|message\|>"
    r"(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|(?=<\|channel\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-/]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def parse(text: str, parameters: Mapping[str, Mapping[str, Any]]) -> Answer:
    """Read the messages of an answer."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[Call | Malformed] = []
    for message in _MESSAGE.finditer(text):
        recipient, channel = _RECIPIENT.search(message["header"]), _CHANNEL.search(message["header"])
        if recipient:
            calls.append(make_call(recipient[1], message["body"], message["body"]))
        elif channel and channel[1] == "analysis":
            reasoning.append(message["body"])
        else:
            content.append(message["body"])
    if not _MESSAGE.search(text):
        content.append(text)
    return Answer("\n".join(content).strip(), calls, "\n".join(reasoning).strip())
