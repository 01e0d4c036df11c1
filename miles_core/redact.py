"""Remove credentials from everything that a run writes.

Only ``redact`` decides what a credential is. All writers call it: files of the run directory, log handlers, metrics services and
error messages.
"""

from __future__ import annotations

import html
import io
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any
from urllib.parse import quote, quote_plus

#: Replacement for a credential.
MARK = "<redacted>"

#: Minimum length of a secret environment value; shorter values are likely to be ordinary words.
_SHORTEST = 8
_WORDS = r"token|key|secret|password|passwd|pwd|auth|authorization|signature|sig|credential|credentials|bearer"
#: Matches names of environment variables and URL query parameters that contain one of these words.
_NAME = re.compile(
    rf"(?:^|[_.\-]|(?<=[a-z])(?=[A-Z]))(?:\w*(?:token|secret|password|credential)s?|{_WORDS})(?:$|[_.\-\d])", re.I
)
#: Matches names of headers, flags and entries that hold a credential. Plain ``key`` and ``token`` are names of ordinary options. The end of a
#: name decides, and a search tries it at few letters: what precedes it would have to be matched again at every character.
_END = (
    r"(?=[abhiprsw])(?:(?:api|access|secret|private|auth|session|signing|bearer|refresh|id|wandb|hf)[_\-]?(?:key|token)|password|passwd"
    r"|secret|(?<!\w)authorization)"
)
_ENTRY = rf"[\w\-]*{_END}"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?i)\b([a-z][a-z0-9+.\-]*://)[^\s/?#@\"'<>]+@"), rf"\1{MARK}@"),  # http://user:password@host
    (re.compile(rf"(?i)([?&;#][\w.\-\[\]%]*?(?:{_WORDS})[\w.\-\[\]%]*=)(?!\${{)[^&;#\s\"'<>]+"), rf"\1{MARK}"),
    (re.compile(r"\b([bB](?i:earer|asic))(\s+|%20)(?=[A-Za-z0-9+/_.~\-=]{8,})[A-Za-z0-9+/_.~\-]+=*"), rf"\1\2{MARK}"),
    (
        re.compile(rf"(?i)({_END}[\"']?\s*[=:]\s*[\"']?)(?!\s|\${{|{re.escape(MARK)})[^\s\"',;&}}]+"),
        rf"\1{MARK}",
    ),
    (re.compile(rf"(?i)((?:^|\s)--{_ENTRY}\s+)(?!-)[^\s\"',]+"), rf"\1{MARK}"),
)
#: Occurs in every text that one of the patterns matches: most texts are none of these, and the search is quick.
_SUSPECT = re.compile(r"(?i)[=:]|--[\w\-]+\s|bearer|basic")


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with credentials replaced by ``<redacted>``.

    Credentials are: user names and passwords in URLs, URL parameters with a name such as ``token``, bearer tokens, entries such as
    ``api_key=...``, and the values of environment variables with a name such as ``SERVICE_TOKEN``.

    Args:
        environment: environment variables; by default those of this process.
    """
    return _replace(text, secrets(os.environ if environment is None else environment))


class RedactingStream(io.TextIOWrapper):
    """A text stream for a process's output that redacts every line. What is written in parts is redacted when its line is complete, or at
    ``flush``. Writes of other languages to the same file descriptor are not seen."""

    _held = ""

    @classmethod
    def of(cls, descriptor: int) -> RedactingStream:
        """Make a stream that writes to a file descriptor and does not close it."""
        return cls(open(descriptor, "wb", closefd=False), encoding="utf-8", errors="replace", line_buffering=True)

    def write(self, text: str) -> int:
        lines, newline, self._held = (self._held + text).rpartition("\n")
        if newline:
            super().write(redact(lines + newline))
        return len(text)

    def flush(self) -> None:
        if self._held:
            super().write(redact(self._held))
            self._held = ""
        super().flush()


def show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a redacted traceback to standard error; for ``sys.excepthook``."""
    print(redact("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def redact_values(value: Any) -> Any:
    """Redact every string in nested dicts, lists and tuples, for writers that take data."""
    return _redact_values(value, secrets(os.environ))


def _redact_values(value: Any, known: list[str]) -> Any:
    if isinstance(value, str):
        return _replace(value, known)
    if isinstance(value, Mapping):
        return {
            name: MARK
            if isinstance(entry, str) and entry and isinstance(name, str) and _holds_credential(name)
            else _redact_values(entry, known)
            for name, entry in value.items()
        }
    if isinstance(value, list | tuple):
        words = redact_values_of_flags([_redact_values(entry, known) for entry in value])
        return words if isinstance(value, list) else tuple(words)
    return value


def _replace(text: str, known: list[str]) -> str:
    for value in known:
        text = text.replace(value, MARK)
    if _SUSPECT.search(text):
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
    return text


def redact_values_of_flags(words: list[Any]) -> list[Any]:
    """Redact command-line words that follow a flag for a credential."""
    redacted = list(words)
    for i, word in enumerate(words[:-1]):
        if (
            isinstance(word, str)
            and word.startswith("--")
            and _holds_credential(word[2:])
            and isinstance(words[i + 1], str)
        ):
            redacted[i + 1] = MARK
    return redacted


def secrets(environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables with a credential-like name, as they are written in text, JSON, HTML and URLs, longest first."""
    values = set[str]()
    for name, value in environment.items():
        if _names_credential(name) and not value.startswith("/"):  # a path to a socket or key file is not secret
            values |= _spellings(value)
    return sorted(values, key=len, reverse=True)


@lru_cache(maxsize=256)
def _spellings(value: str) -> frozenset[str]:
    """Return a secret with and without surrounding whitespace, and as JSON, YAML, HTML, URLs and ``repr`` escape it; empty if it is short."""
    bare = value.strip()
    if len(bare) < _SHORTEST:
        return frozenset()
    escaped = (
        json.dumps(bare)[1:-1],
        json.dumps(bare, ensure_ascii=False)[1:-1],
        repr(bare)[1:-1],
        bare.replace("'", "''"),
    )
    pages = (html.escape(bare), html.escape(bare, quote=False), quote(bare), quote(bare, safe=""), quote_plus(bare))
    return frozenset({value, bare, *escaped, *pages})


@lru_cache(maxsize=4096)  # every log line checks the same names
def _names_credential(name: str) -> bool:
    return _NAME.search(name) is not None


def has_credentials(url: str) -> bool:
    """Whether a URL contains a user name, a password, or a credential-like parameter. A ``${NAME}`` placeholder does not count."""
    return redact(re.sub(r"\$\{\w+\}", "", url), {}) != re.sub(r"\$\{\w+\}", "", url)


@lru_cache(maxsize=4096)
def _holds_credential(name: str) -> bool:
    return re.fullmatch(_ENTRY, name, re.I) is not None


class RedactingFormatter(logging.Formatter):
    """A formatter whose lines, tracebacks included, hold no credentials."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
