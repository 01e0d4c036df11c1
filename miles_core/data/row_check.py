"""Checks of the entries of a prompt file's row."""

from __future__ import annotations

import json
from typing import Any

from miles_core.data.media import explain_media, find_media
from miles_core.errors import DataError


def check_text(value: Any, key: str, place: str) -> None:
    """Raise DataError for an unpaired surrogate (``"\\ud83d"`` alone), which no tokenizer accepts, and for non-finite numbers, which
    Python's JSON reader accepts although NaN equals nothing."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {key!r} holds half of a surrogate pair (character {error.start}), which is not valid text; correct or "
            "remove the row"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{place}: {key!r} holds NaN or an infinite number, which is not valid JSON; correct or remove the row"
        ) from error


def check_prompt(prompt: Any, key: str, place: str, media: bool) -> None:
    """Raise DataError for a prompt that is neither text nor chat messages, or that holds media unless ``media``."""
    if isinstance(prompt, str) and prompt:
        return
    if not media and (found := find_media(prompt)):
        raise DataError(explain_media(place, f"the prompt {key!r} holds {found}"))
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt):
        return
    wanted = "a text, or a list of messages with 'role' and 'content'"
    what = "is empty" if prompt in ("", [], None) else f"is {prompt!r:.80}"
    raise DataError(f"{place}: the prompt {key!r} {what}; it must be {wanted}")
