"""Detects images, video and sound in prompts. Runs pass only text to a model, so such prompts are rejected.

Chat messages contain media as typed content parts (``{"type": "image", ...}``), data sets as additional columns (``images``), and
preprocessed data sets as the outputs of a processor (``pixel_values``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

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
    return f"{place}: {what}, but a run passes only text to a model; remove such rows, or the images, video and sound in them"


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
