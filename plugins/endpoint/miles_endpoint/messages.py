"""Chat messages as agents send them: checked, converted for the chat template, and identified by a digest.

Two messages are the same if role, text, tool calls (id, name, arguments as canonical JSON) and ``tool_call_id`` are the same. White space
around an assistant's text, the spelling of arguments, the division of a text into parts and unknown keys do not count, because
clients change them. Reasoning is compared separately: a client may leave it out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from miles_core.data import Media, read_parts
from miles_core.plugin import DataError
from miles_endpoint.api_error import refuse

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True)
class ChatMessage:
    """One message.

    Attributes:
        data: the message for the chat template.
        digest: identifies the message without its reasoning.
        reasoning: the reasoning of an assistant's message; None if the client left it out.
    """

    data: dict[str, Any]
    digest: bytes
    reasoning: str | None = None

    @property
    def role(self) -> str:
        """Role of the message: system, user, assistant or tool."""
        return str(self.data["role"])


def read_messages(raw: Any, images: bool = False) -> list[ChatMessage]:
    """Convert the ``messages`` of a request. ``images``: whether the model reads images, in messages of users and tools.

    Raises:
        ApiError: a message is malformed, or holds something that the model does not read.
    """
    if not isinstance(raw, list) or not raw:
        raise refuse(f"messages must be a list of at least one message, got {raw!r:.80}")
    names: dict[str, str] = {}
    made = []
    for number, message in enumerate(raw):
        if not isinstance(message, Mapping):
            raise refuse(f"messages[{number}] must be an object, got {message!r:.80}")
        made.append(_read_message(message, f"messages[{number}]", names, images))
    return made


def _read_message(message: Mapping[str, Any], place: str, names: dict[str, str], images: bool) -> ChatMessage:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise refuse(f"{place} has the role {message.get('role')!r:.40}; the roles are {', '.join(_ROLES)}")
    shown: list[Any] = []
    content = message.get("content")
    if images and role in ("user", "tool"):
        content, shown = _read_images(content, f"{place}.content")
    text = read_text(content, place)
    data: dict[str, Any] = {"role": role, "content": shown or text}
    text += "".join(f"\0{part['media'].digest}" for part in shown if "media" in part)  # identifies the images
    if role == "tool":
        data["tool_call_id"] = str(message.get("tool_call_id") or "")
        name = message.get("name") or names.get(data["tool_call_id"])
        data |= {"name": str(name)} if name else {}
        return ChatMessage(data, digest_of(role, text, (), data["tool_call_id"]))
    if role != "assistant":
        return ChatMessage(data, digest_of(role, text))
    if message.get("function_call"):
        raise refuse(f"{place} has a function_call, which tool_calls replaced")
    calls = [_read_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(message.get("tool_calls") or ())]
    names |= {call["id"]: call["function"]["name"] for call in calls}
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    reasoning = reasoning if isinstance(reasoning, str) and reasoning.strip() else None
    if calls:
        data["tool_calls"] = calls
    if reasoning:
        data["reasoning_content"] = reasoning
    return ChatMessage(data, answer_digest(text, calls), reasoning)


def read_content(content: Any, place: str, images: bool) -> str | list[Any]:
    """Return the text of a content, or its parts with media if it holds images that the model reads.

    Raises:
        ApiError: a part is malformed, or holds something that the model does not read.
    """
    rest, whole = _read_images(content, place) if images else (content, [])
    return whole or read_text(rest, place)


def _read_images(content: Any, place: str) -> tuple[Any, list[Any]]:
    """Return the content without images, and all parts with media if there are images, otherwise none."""
    if not isinstance(content, list):
        return content, []
    try:  # parts that have media were read before
        parts = [part if _shows(part) else read_parts([part])[0] for part in content]
    except DataError as error:
        raise refuse(f"{place}: {error}") from error
    if not any(map(_shows, parts)):
        return content, []
    whole = [part if _shows(part) else {"type": "text", "text": read_text([part], place)} for part in parts]
    return [part for part in parts if not _shows(part)], whole


def _shows(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("media"), Media)


def read_text(content: Any, place: str) -> str:
    """Return the text of a message's content: None is empty, and the texts of parts are joined.

    Raises:
        ApiError: the content holds an image or another kind of part.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(f"{place}.content must be a text or a list of parts, got {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else part
        if (kind is not None and kind not in _TEXT_PARTS) or not isinstance(text, str):
            raise refuse(f"{place}.content holds a part of the type {kind!r}; this model reads text only")
        texts.append(text)
    return "".join(texts)


def _read_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refuse(f"{place} must be an object with id and function, got {call!r:.80}")
    return make_call(str(call.get("id") or ""), function["name"], function.get("arguments"))


def make_call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a tool call for the chat template. Arguments that are the text of a JSON object become the object; another text stays."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }


def answer_digest(text: str, calls: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the digest of an assistant's message; ``calls`` are results of ``make_call``."""
    own = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return digest_of("assistant", text.strip(), own)


def digest_of(*parts: Any) -> bytes:
    """Return a 16-byte digest of JSON values, independent of the order of keys."""
    return blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).digest()
