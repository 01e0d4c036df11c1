"""Validates text and JSON that enter a run from outside: results of tools, observations, messages of agents, texts of users' functions. Such a text
may be a ``str`` that is not valid Unicode: JSON writes half of a surrogate pair as ``"\\ud83d"``, and Python reads the bytes of
file names and arguments that are not UTF-8 as surrogates. Tokenizers and encoders raise errors of various types for them. Every text passes
``valid_text`` (or ``valid_data``) where it enters, so that one text never ends a run.

JSON of files is parsed with ``load_strict_json``, which rejects duplicate keys; Python's parser silently keeps the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: Levels of lists and objects that data from outside may have. Recursive code, such as chat templates and JSON writers, reaches its limit at
#: a few hundred.
MAX_DEPTH = 100
#: Characters of an error message that are shown.
_LONGEST = 2000


def valid_text(text: str) -> str:
    """Return ``text`` with both halves of a surrogate pair joined, and each half without the other replaced by U+FFFD. Valid text, which may
    contain NUL and other control characters, is returned unchanged."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def valid_data(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a copy of JSON data with ``valid_text`` applied to all texts and keys. Values of other types are kept.

    Raises:
        ValueError: it has more than ``depth`` levels.
    """
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, Mapping | list | tuple):
        if not depth:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, Mapping):
            return {_valid_key(key): valid_data(item, depth - 1) for key, item in value.items()}
        return [valid_data(item, depth - 1) for item in value]
    return value


def _valid_key(key: Any) -> Any:
    return valid_text(key) if isinstance(key, str) else key


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an error of other code, as valid text of limited length, even if its ``__str__`` fails."""
    name = type(error).__name__
    try:
        message = valid_text(str(error))
    except Exception:
        return f"{name} (its message cannot be read)"
    cut = f"{message[:_LONGEST]} [{len(message) - _LONGEST} more characters]" if len(message) > _LONGEST else message
    return f"{name}: {cut}" if message else name


def describe_notes(error: BaseException) -> str:
    """Return the notes of an error, each in parentheses after a space."""
    return "".join(f" ({valid_text(str(note))})" for note in getattr(error, "__notes__", ()))


def count_characters(value: Any) -> int:
    """Return the number of characters of all texts in JSON data of at most ``MAX_DEPTH`` levels, without keys."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(count_characters, value.values()))
    return sum(map(count_characters, value)) if isinstance(value, list | tuple) else 0


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
