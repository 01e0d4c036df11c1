"""Parses JSON and rejects duplicate keys (Python's parser silently keeps the last one)."""

from __future__ import annotations

import json
from typing import Any


def load_strict_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is malformed, or an object has a duplicate key; the message names it.
        RecursionError: nested too deeply.
    """
    if isinstance(text, str) and not text.startswith("\ufeff"):
        return _DECODER.decode(text)  # ``json.loads`` makes a decoder for each call
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in made if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs {names.count(twice)} times in one object; keep one of them")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
