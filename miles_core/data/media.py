"""Images, video and sound in prompts, which no part of a run can show to a model: they are found, so that no run trains blind.

Chat messages carry them as typed parts of their content (``{"type": "image", ...}``), data sets as columns beside the prompt (``images``),
and prepared data sets as what a processor made of them (``pixel_values``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_KIND = r"(?:images?|img|pictures?|photos?|videos?|audios?)"
#: Types of content parts: ``image``, ``image_url``, ``input_audio``, ``video_file``; more words than in the names of columns, which may
#: well be text ("speech").
_TYPE = re.compile(
    rf"(?:input_|output_)?(?:{_KIND}|sounds?|speech|voice|clips?|frames?|media)(?:[_-]\w+)?", re.IGNORECASE
)
#: Columns and keys of a message or a part: the kinds themselves, where they are stored, and what processors make of them.
_KEY = re.compile(
    rf"(?:input_)?(?:{_KIND}|multi_?modal)(?:_(?:urls?|paths?|files?|bytes|base64|data|inputs?|features|sources?|content|arrays?))?"
    r"|pixel_values(?:_\w+)?|pixel_(?:attention_)?mask|(?:image|video)_grid_thw|(?:image|video|audio)_(?:sizes|embeds)"
    r"|input_features(?:_\w+)?|feature_attention_mask|mm_(?:inputs?|data)|second_per_grid_ts",
    re.IGNORECASE,
)


@lru_cache(maxsize=1024)
def is_media_key(name: str) -> bool:
    """Whether a column or a key of this name holds images, video or sound."""
    return _KEY.fullmatch(name) is not None


def is_empty(value: Any) -> bool:
    """Whether nothing is there: null, or an empty list, text or object, or a list or object of such."""
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or (isinstance(value, str | bytes) and not value)


def explain_media(place: str, what: str) -> str:
    """The error of a row: where it is, what it holds, what to do."""
    return (
        f"{place}: {what}, and a run shows a model text only; remove such rows, or the images, video and sound in them"
    )


def find_media(prompt: Any) -> str:
    """Describe the first image, video or sound in chat messages, as words that follow "holds"; empty where there is none."""
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
