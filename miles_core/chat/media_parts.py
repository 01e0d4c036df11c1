"""Media in chat messages: content parts ``{"type": "image", "media": ...}``, which a chat template renders as a placeholder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_core.errors import DataError

#: Key of a content part that holds its media (``miles_core.data.Media``).
MEDIA = "media"


def take_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
    """Return the messages with bare parts ``{"type": ...}`` in place of media, and the media in order."""
    found: list[Any] = []

    def take(part: Any) -> Any:
        if not isinstance(part, Mapping) or MEDIA not in part:
            return part
        found.append(part[MEDIA])
        return {"type": part["type"]}

    made = []
    for message in messages:
        content = message.get("content")
        made.append({**message, "content": list(map(take, content))} if isinstance(content, list) else dict(message))
    return made, tuple(found)


def attach_media(messages: Sequence[Mapping[str, Any]], media: Sequence[Any]) -> list[dict[str, Any]]:
    """Put media into the bare image parts of messages, in order, as of a sample's prompt.

    Raises:
        DataError: the numbers of bare parts and of media differ.
    """
    rest = iter(media)

    def put(part: Any) -> Any:
        bare = isinstance(part, Mapping) and part.get("type") == "image" and MEDIA not in part
        return {**part, MEDIA: next(rest)} if bare else part

    if (places := len(list(_bare(messages)))) != len(media):
        raise DataError(f"the messages have {places} places for images, and {len(media)} images belong to them")
    made = []
    for message in messages:
        content = message.get("content")
        made.append({**message, "content": list(map(put, content))} if isinstance(content, list) else dict(message))
    return made


def _bare(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") == "image" and MEDIA not in part:
                yield part
