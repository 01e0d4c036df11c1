"""Remove credentials from everything that a run writes.

Only ``redact`` decides what a credential is. All writers call it: files of the run directory, log handlers, metrics services and
error messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

#: Replacement for a credential.
MARK = "<redacted>"

#: Minimum length of a secret environment value; shorter values are likely to be ordinary words.
_SHORTEST = 8
_WORDS = r"token|key|secret|password|passwd|pwd|auth|authorization|signature|sig|credential|credentials|bearer"
#: Matches names of environment variables and URL query parameters that contain one of these words.
_NAME = re.compile(
    rf"(?:^|[_.\-]|(?<=[a-z])(?=[A-Z]))(?:\w*(?:token|secret|password|credential)s?|{_WORDS})(?:$|[_.\-\d])", re.I
)
#: Matches names of headers, flags and entries that hold a credential. Plain ``key`` and ``token`` are names of ordinary options.
_ENTRY = (
    r"(?:[\w\-]*(?:api|access|secret|private|auth|session|signing|bearer|refresh|id|wandb|hf)[_\-]?(?:key|token)|[\w\-]*(?:password|passwd|secret)"
    r"|authorization|proxy-authorization|x-auth-token)"
)
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?i)\b([a-z][a-z0-9+.\-]*://)[^\s/?#@\"'<>]+@"), rf"\1{MARK}@"),  # http://user:password@host
    (re.compile(rf"(?i)([?&;#][\w.\-\[\]%]*?(?:{_WORDS})[\w.\-\[\]%]*=)(?!\${{)[^&;#\s\"'<>]+"), rf"\1{MARK}"),
    (re.compile(r"(?i)\b(bearer|basic)(\s+|%20)(?=[A-Za-z0-9+/_.~\-=]{8,})[A-Za-z0-9+/_.~\-]+=*"), rf"\1\2{MARK}"),
    (
        re.compile(
            rf"(?i)((?<![\w])(?:--)?[\"']?{_ENTRY}[\"']?\s*[=:]\s*[\"']?)(?!\s|\${{|{re.escape(MARK)})[^\s\"',;&}}]+"
        ),
        rf"\1{MARK}",
    ),
    (re.compile(rf"(?i)((?:^|\s)--{_ENTRY}\s+)(?!-)[^\s\"',]+"), rf"\1{MARK}"),
)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with credentials replaced by ``<redacted>``.

    Credentials are: user names and passwords in URLs, URL parameters with a name such as ``token``, bearer tokens, entries such as
    ``api_key=...``, and the values of environment variables with a name such as ``SERVICE_TOKEN``.

    Args:
        environment: environment variables; by default those of this process.
    """
    for value in secrets(os.environ if environment is None else environment):
        text = text.replace(value, MARK)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_values(value: Any) -> Any:
    """Redact every string in nested dicts, lists and tuples."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            name: MARK
            if isinstance(entry, str) and entry and isinstance(name, str) and _holds_credential(name)
            else redact_values(entry)
            for name, entry in value.items()
        }
    if isinstance(value, list | tuple):
        words = redact_values_of_flags([redact_values(entry) for entry in value])
        return words if isinstance(value, list) else tuple(words)
    return value


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
    """Return the values of variables with a credential-like name, with and without surrounding whitespace, longest first."""
    values = set()
    for name, value in environment.items():
        if _NAME.search(name) and not value.startswith("/"):  # a path to a socket or key file is not secret
            values |= {value, value.strip()}
    return sorted((v for v in values if len(v.strip()) >= _SHORTEST), key=len, reverse=True)


def has_credentials(url: str) -> bool:
    """Whether a URL contains a user name, a password, or a credential-like parameter. A ``${NAME}`` placeholder does not count."""
    return redact(re.sub(r"\$\{\w+\}", "", url), {}) != re.sub(r"\$\{\w+\}", "", url)


def _holds_credential(name: str) -> bool:
    return re.fullmatch(_ENTRY, name, re.I) is not None
