"""Takes the media out of the rows of prompt files (``--media``).

Media are content parts of chat messages, in the forms of OpenAI and Hugging Face, or the values of one column. A value is the path of a
file (relative to the prompt file), a data URI, bytes (parquet), or an object with ``path``, ``bytes`` or ``url``. In a column, they belong
to the places that the prompt marks, in order: parts ``{"type": "image"}``, or ``<image>`` in the text of a message.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from miles_core.data.media import Media, find_media, is_empty, is_media_key
from miles_core.errors import DataError

Chat = list[dict[str, Any]]
#: The kind of media that is passed on.
IMAGE = "image"
#: Names of columns, and of keys of content parts, that hold images; other media are rejected.
_IMAGES = re.compile(
    r"(?:input_)?(?:images?|img|pictures?|photos?)(?:_(?:urls?|paths?|files?|bytes|base64|data))?", re.IGNORECASE
)
#: Keys of an object that holds a value, in order of precedence.
_KEYS = ("bytes", "base64", "url", "path", "data")
#: Place of an image in a text, as in many data sets.
MARK = "<image>"
_DATA_URI = re.compile(r"data:[\w.+/-]*(?:;[\w.+=-]+)*?(?P<base64>;base64)?,(?P<data>.*)", re.DOTALL)


def media_columns(names: Iterator[str] | list[str]) -> list[str]:
    """Return the columns whose names are those of images."""
    return [name for name in names if _IMAGES.fullmatch(name)]


class MediaReader:
    """Takes the media out of one row.

    Args:
        folder: directory to which paths are relative; None refuses paths.

    Attributes:
        found: the media of the row, in the order of their places in the prompt.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.found: list[Media] = []
        self._column: Iterator[Any] = iter(())
        self._name = ""

    def take(self, prompt: str | Chat, row: Mapping[str, Any], named: list[str], place: str) -> str | Chat:
        """Return the prompt with a part ``{"type": "image"}`` at each place of an image.

        Args:
            prompt: a text or chat messages.
            row: the row; of the columns that are not ``named``, at most one may hold media.
            named: columns with other purposes.
            place: location of the row, for messages.

        Raises:
            DataError: media of another kind, a value that cannot be read, or numbers of places and values that differ.
        """
        filled = {name: v for name, v in row.items() if name not in named and is_media_key(name) and not is_empty(v)}
        if other := [name for name in filled if not _IMAGES.fullmatch(name)]:
            raise DataError(
                f"{place}: the column {other[0]!r} is not empty, but only images are passed to a model; remove it"
            )
        if len(filled) > 1:
            raise DataError(
                f"{place}: the columns {' and '.join(map(repr, filled))} hold images; keep one, in the order of their places"
            )
        self._name, values = next(iter(filled.items()), ("", []))
        many = list(values) if isinstance(values, list | tuple) else [values]
        self._column = iter(many)
        try:
            if isinstance(prompt, str):
                self.found += [self._read(value, f"the column {self._name!r}") for value in many]
                return prompt
            taken = [self._take_message(message) for message in prompt]
            if left := len(list(self._column)):
                raise DataError(
                    f"the column {self._name!r} has {len(many)} images and the prompt {len(many) - left} places for them; mark each with "
                    f'a part {{"type": "image"}}, or with {MARK} in the text of a message'
                )
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        return taken

    def _take_message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str) and self._name and MARK in content:
            head, *rest = content.split(MARK)
            parts = [_text(head)] if head else []
            for text in rest:
                self.found.append(self._next_value())
                parts += [{"type": IMAGE}, *([_text(text)] if text else [])]
            content = parts
        elif isinstance(content, list):
            content = [self._take_part(part) if isinstance(part, Mapping) else part for part in content]
        taken = {**message, "content": content} if "content" in message else message
        if held := find_media([{k: v for k, v in taken.items() if k != "content"}]):
            raise DataError(f"a message holds {held}; write it as a part of its content")
        return taken

    def _take_part(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        filled = {key: value for key, value in part.items() if key != "type" and not is_empty(value)}
        keys = [key for key in filled if _IMAGES.fullmatch(key)]
        kind = str(part.get("type", IMAGE if keys else "text"))
        if not _IMAGES.fullmatch(kind):
            if held := find_media(part):
                raise DataError(f"the prompt holds {held}, but only images are passed to a model; remove the row")
            return part
        keys = keys or [key for key in filled if key in _KEYS]
        if not keys and (other := [key for key in filled if key not in ("detail", "text")]):
            raise DataError(f"a part of type {kind!r} has {other[0]!r}; give an image as path, data URI or bytes")
        self.found.append(self._read(filled[keys[0]], f"a part of type {kind!r}") if keys else self._next_value())
        return {"type": IMAGE}

    def _next_value(self) -> Media:
        try:
            value = next(self._column)
        except StopIteration:
            named = f"the column {self._name!r} has fewer" if self._name else "no column holds images"
            raise DataError(f"the prompt has {len(self.found) + 1} places for images or more, and {named}") from None
        return self._read(value, f"the column {self._name!r}")

    def _read(self, value: Any, what: str) -> Media:
        """Return the media of a value; ``what`` describes where the value is."""
        if isinstance(value, Mapping):
            value = next((value[key] for key in _KEYS if not is_empty(value.get(key))), None)
        if isinstance(value, bytes):
            return Media.of(IMAGE, value)
        if not isinstance(value, str) or not value:
            raise DataError(f"{what} holds {value!r:.80}; give an image as path, data URI or bytes")
        if found := _DATA_URI.fullmatch(value):
            try:
                data = b64decode(found["data"], validate=True) if found["base64"] else unquote(found["data"]).encode()
            except (binascii.Error, ValueError) as error:
                raise DataError(f"{what} holds a data URI that is not valid base64 ({error})") from error
            return Media.of(IMAGE, data)
        if re.match(r"[a-z][a-z0-9+.-]+://", value) and not value.startswith("file://"):
            raise DataError(f"{what} holds the address {value:.80}; download the image and give its path")
        if self.folder is None:
            raise DataError(f"{what} holds {value!r:.80}; give an image as data URI")
        try:
            return Media.of(IMAGE, self.folder / value.removeprefix("file://"))
        except DataError as error:
            raise DataError(f"{what}: {error}") from error


def read_parts(content: Sequence[Any]) -> list[Any]:
    """Return content parts in OpenAI's form with ``{"type": "image", "media": Media}`` in place of images, which must be data URIs.

    Raises:
        DataError: media of another kind, or a value that cannot be read. The message is a predicate.
    """
    reader, made = MediaReader(None), []
    for part in content:
        before = len(reader.found)
        taken = reader._take_part(part) if isinstance(part, Mapping) else part
        made.append({**taken, "media": reader.found[-1]} if len(reader.found) > before else taken)
    return made


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
