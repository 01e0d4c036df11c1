"""Observations as contents of chat messages: texts, and pictures as media."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from miles_core.data import Media, valid_text
from miles_core.plugin import DataError


def read_observation(given: Any, limit: int, images: bool) -> str | list[dict[str, Any]]:
    """Return the content of a message for an observation: a text, or parts if it has pictures.

    Args:
        given: what an environment returned, see ``Observation``.
        limit: characters of each text that the model receives.
        images: whether the run passes images to the model.

    Raises:
        DataError: it is not an observation, or has pictures that the model cannot read. The message is a predicate.
    """
    if isinstance(given, str):
        return _cut(given, limit)
    if not isinstance(given, list) or not given:
        raise DataError(f"is {given!r:.80}; it must be a text, or a list of texts and pictures")
    parts = [{"type": "text", "text": _cut(x, limit)} if isinstance(x, str) else _picture(x) for x in given]
    if all(part["type"] == "text" for part in parts):
        return "".join(str(part["text"]) for part in parts)
    if not images:
        raise DataError(
            "has a picture, and this run passes only text to the model; give --media and --apply-chat-template"
        )
    return parts


def _picture(given: Any) -> dict[str, Any]:
    if isinstance(given, bytes):
        return {"type": "image", "media": Media.of("image", given)}
    if not any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(given).__mro__):
        raise DataError(f"holds {given!r:.80}; a picture is one of Pillow, or the bytes of an image file")
    buffer = BytesIO()
    try:
        given.save(buffer, "PNG")
    except Exception as error:  # modes without PNG, files that are truncated
        raise DataError(f"holds a picture that cannot be stored as PNG ({error})") from error
    return {"type": "image", "media": Media.of("image", buffer.getvalue())}


def _cut(text: str, limit: int) -> str:
    text = valid_text(text)
    return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} more characters were cut]"
