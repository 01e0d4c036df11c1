"""Images, video and sound in prompts: ``Media`` is one of them, and functions detect them in rows.

Chat messages contain media as typed content parts (``{"type": "image", ...}``), data sets as additional columns (``images``), and
preprocessed data sets as the outputs of a processor (``pixel_values``). A run passes media to its model with ``--media``
(``media_reader``); otherwise only text, and rows with media are rejected. The content of media is opaque here: the backend's
``MediaProcessor`` (``contracts.media``) decodes it.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles_core.errors import DataError


@dataclass(frozen=True)
class Media:
    """A part of a prompt that is not text. Two are equal if their kinds and digests are.

    Attributes:
        kind: ``image``.
        digest: SHA-256 of the content.
        source: the content, or the path of its file, which stays on disk.
    """

    kind: str
    digest: str
    source: bytes | str = field(compare=False, repr=False)

    @classmethod
    def of(cls, kind: str, source: bytes | Path) -> Media:
        """Make media from its content or its file.

        Raises:
            DataError: the file cannot be read. The message is a predicate; the caller prepends the location.
        """
        content = _read(source) if isinstance(source, Path) else source
        where = str(source.resolve()) if isinstance(source, Path) else source
        return cls(kind, hashlib.sha256(content).hexdigest(), where)

    def read(self) -> bytes:
        """Return the content.

        Raises:
            DataError: its file cannot be read, or was changed.
        """
        if isinstance(self.source, bytes):
            return self.source
        content = _read(Path(self.source))
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise DataError(
                f"the file {self.source} was changed after the run read it; put back what it held, or start a new run"
            )
        return content

    def to_json(self) -> dict[str, str]:
        """Return the media as JSON: the path of a file, or the content in base64."""
        here = isinstance(self.source, bytes)
        source = {"content": b64encode(self.source).decode()} if here else {"path": self.source}  # type: ignore[arg-type]
        return {"kind": self.kind, "digest": self.digest, **source}  # type: ignore[dict-item]

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> Media:
        """Inverse of ``to_json``; does not read files."""
        source = b64decode(data["content"]) if "content" in data else data["path"]
        return cls(data["kind"], data["digest"], source)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise DataError(f"the file {path} cannot be read ({getattr(error, 'strerror', None) or error})") from error


_KIND = r"(?:images?|img|pictures?|photos?|videos?|audios?)"
#: Types of content parts: ``image``, ``image_url``, ``input_audio``, ``video_file``. This matches more words than ``_KEY``, because
#: a column with such a name may hold text ("speech").
_TYPE = re.compile(
    rf"(?:input_|output_)?(?:{_KIND}|sounds?|speech|voice|clips?|frames?|media)(?:[_-]\w+)?", re.IGNORECASE
)
#: Names of columns and of keys of messages or parts: media kinds, their storage locations, and outputs of processors.
_KEY = re.compile(
    rf"(?:input_)?(?:{_KIND}|multi_?modal)(?:_(?:urls?|paths?|files?|bytes|base64|data|inputs?|features|sources?|content|arrays?))?"
    r"|pixel_values(?:_\w+)?|pixel_(?:attention_)?mask|(?:image|video)_grid_thw|(?:image|video|audio)_(?:sizes|embeds)"
    r"|input_features(?:_\w+)?|feature_attention_mask|mm_(?:inputs?|data)|second_per_grid_ts",
    re.IGNORECASE,
)


@lru_cache(maxsize=1024)
def is_media_key(name: str) -> bool:
    """Return whether a column or key of this name holds images, video or sound."""
    return _KEY.fullmatch(name) is not None


def is_empty(value: Any) -> bool:
    """Return whether ``value`` is null, an empty list, string or object, or a list or object of only such values."""
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or (isinstance(value, str | bytes) and not value)


def explain_media(place: str, what: str) -> str:
    """Return the error message for the row at ``place`` that holds ``what``."""
    return (
        f"{place}: {what}, but a run passes only text to a model; --media passes images, otherwise remove such rows, or the images, "
        "video and sound in them"
    )


def find_media(prompt: Any) -> str:
    """Describe the first image, video or sound in chat messages, as an object of "holds"; "" if there is none."""
    if isinstance(prompt, list):
        return next(filter(None, map(find_media, prompt)), "")
    if not isinstance(prompt, Mapping):
        return ""
    kind = prompt.get("type")
    if isinstance(kind, str) and _TYPE.fullmatch(kind):
        return f"a part of type {kind!r}"
    for key, value in prompt.items():
        if key == "content" or (key.startswith("tool") and key != "tools"):
            if found := find_media(value):
                return found
        elif isinstance(key, str) and key != "type" and is_media_key(key) and not is_empty(value):
            return f"an entry {key!r}"
    return ""
