"""Remove credentials from everything that a run writes, and show control characters on terminals and pages.

Only ``redact`` decides what a credential is. All writers call it: files of the run directory, log handlers, metrics services and
error messages.
"""

from __future__ import annotations

import html
import io
import json
import logging
import operator
import os
import re
import string
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import TracebackType
from typing import Any
from urllib.parse import quote, quote_plus

#: Replacement for a credential.
MARK = "<redacted>"

#: Minimum length of a secret environment value; shorter values are likely to be ordinary words.
_SHORTEST = 8
_WORDS = r"token|key|secret|password|passwd|pwd|auth|authorization|signature|sig|credential|credentials|bearer"
#: Matches names of environment variables that contain one of these words.
_NAME = re.compile(
    rf"(?:^|[_.\-]|(?<=[a-z])(?=[A-Z]))(?:\w*(?:token|secret|password|credential)s?|{_WORDS})(?:$|[_.\-\d])", re.I
)
#: Matches names whose last word says that the value is about a credential, such as ``AUTH_TYPE`` and ``KEY_FILE``.
_ABOUT = re.compile(
    r"[_.\-](?:type|kind|mode|method|name|file|path|dir|format|layout|algorithm|provider|limit|length|count|size|ttl|expiry)$"
    r"|tokens$",
    re.I,
)
#: Matches names of headers, flags and entries that hold a credential. Plain ``key`` and ``token`` are names of ordinary options. Only the
#: end of a name is matched, which is faster: a pattern for the beginning would be tried at every character.
_BEGIN = r"(?:(?<![a-zA-Z])|(?-i:(?<=[a-z])(?=[A-Z])))"
_END = (
    rf"(?=[abhiprsw])(?:{_BEGIN}(?:api|access|secret|private|auth|session|signing|bearer|refresh|id|wandb|hf)[_\-]?(?:key|token)|password|passwd"
    r"|secret|(?<!\w)authorization)"
)
_ENTRY = rf"[\w\-]*{_END}"
#: Names of URL parameters that hold a credential: a word of the name, or the whole name.
_PARAMETER_NAME = re.compile(
    rf"(?:^|[_.\-\[\]%]|(?<=[a-z])(?=(?-i:[A-Z])))(?:{_WORDS}|(?:api|access|auth|secret|private|session|account|subscription)(?:key|token))"
    r"(?=$|[_.\-\[\]%\d]|(?-i:[A-Z]))|^(?:code|pass|pw|sas|jwt|sid|hmac|sign|passphrase)$",
    re.I,
)
_URL = re.compile(r"(?i)\b[a-z][a-z0-9+.\-]{0,20}://[^\s\"'<>]+")
_PARAMETER = re.compile(r"([?&;#])([\w.\-\[\]%]+)=(?!\${)([^&;#\s\"'<>]+)")
#: Values that are not credentials: numbers, and words for no value.
_NO_SECRET = re.compile(r"\d{1,6}|true|false|none|null", re.I)
_WORD = re.compile(r"[A-Za-z]?[a-z]{1,20}(?:[\-/'][a-z]+)*[.,;:)]*")
#: Words that follow the name of a flag or entry in a sentence, where a value would be.
_IN_SENTENCE = re.compile(
    r"(?:an?|and|are|as|at|be|but|by|can|cannot|does|for|from|has|have|here|holds|if|in|instead|is|its?|may|must|needs|not?|of|on|only|or|says"
    r"|set|should|takes|that|the|there|to|too|was|when|where|which|will|with|without)[.,;:]*"
)


def _redact_parameter(found: re.Match[str], in_url: bool) -> str:
    """Redact the value of a parameter because of its name; in a URL, also because it looks random. Outside a URL, other text has the same
    form, such as ``gym:task?key=value``."""
    mark, name, value = found.groups()
    named = _PARAMETER_NAME.search(name) and not _NO_SECRET.fullmatch(value) and (in_url or not _WORD.fullmatch(value))
    return f"{mark}{name}={MARK}" if named or (in_url and is_random(value)) else found[0]


def _redact_scheme(found: re.Match[str]) -> str:
    """Redact what follows ``Bearer`` or ``Basic``, unless it is an ordinary word ("basic arithmetic")."""
    return found[0] if _WORD.fullmatch(found[3]) else f"{found[1]}{found[2]}{MARK}"


def _redact_entry(found: re.Match[str]) -> str:
    """Redact the value of an entry, unless it is part of a sentence ("password: must be set")."""
    words = _WORD.fullmatch(found[2]) and re.match(" [a-z]", found.string[found.end() :][:2])
    sentence = re.search(r":\s+$", found[1]) and (words or _IN_SENTENCE.fullmatch(found[2]))
    return found[0] if sentence or _NO_SECRET.fullmatch(found[2]) else f"{found[1]}{MARK}"


def _redact_flag(found: re.Match[str]) -> str:
    """Redact the value after a flag, unless it is part of a sentence ("--wandb-key is missing", "--wandb-key KEY")."""
    sentence = _IN_SENTENCE.fullmatch(found[2]) or re.fullmatch("[A-Z]{1,8}[.,;:)]*", found[2])
    return found[0] if sentence else f"{found[1]}{MARK}"


_Replacement = str | Callable[[re.Match[str]], str]
_PATTERNS: tuple[tuple[re.Pattern[str], _Replacement], ...] = (
    (re.compile(r"(?i)\b([a-z][a-z0-9+.\-]{0,20}://)[^\s/?#@\"'<>]+@"), rf"\1{MARK}@"),  # http://user:password@host
    (_URL, lambda url: _PARAMETER.sub(partial(_redact_parameter, in_url=True), url[0])),
    (_PARAMETER, partial(_redact_parameter, in_url=False)),
    (
        re.compile(r"(?i)((?<!\w)authorization[\"']?\s*[=:]\s*[\"']?(?:bearer|basic)(?:\s+|%20))[A-Za-z0-9+/_.~\-=]+"),
        rf"\1{MARK}",
    ),
    (re.compile(r"\b([bB](?i:earer|asic))(\s+|%20)(?=[A-Za-z0-9+/_.~\-=]{8,})([A-Za-z0-9+/_.~\-]+=*)"), _redact_scheme),
    (
        re.compile(rf"(?i)({_END}[\"']?\s*[=:]\s*[\"']?)(?!\s|\${{|{re.escape(MARK)})([^\s\"',;&}}]+)"),
        _redact_entry,
    ),
    (re.compile(rf"(?i)((?:^|\s)--{_ENTRY}\s+)(?!-|{re.escape(MARK)})([^\s\"',]+)"), _redact_flag),
)
#: Occurs in every text that one of the patterns matches. This quick search excludes most texts.
_SUSPECT = re.compile(r"(?i)[=:]|--[\w\-]+\s|bearer|basic")
#: Shortest run of letters and digits that may be random, and the minimum fraction of its characters that differ in kind from the previous
#: one.
_SHORTEST_RANDOM, _CHANGES = 12, 0.25
_KINDS = str.maketrans(string.ascii_lowercase + string.ascii_uppercase + string.digits, "a" * 26 + "A" * 26 + "0" * 10)


def is_random(value: str) -> bool:
    """Whether a value of a URL parameter looks like a generated key: it holds a run of 12 letters and digits or more in which lower case,
    upper case and digits change at every fourth character or more often, as in random characters and not in words, versions and numbers;
    or it is a UUID."""
    if re.search(r"(?i)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", value):
        return True
    for run in re.findall(rf"[A-Za-z0-9]{{{_SHORTEST_RANDOM},}}", value):
        kinds = run.translate(_KINDS)
        if sum(map(operator.ne, kinds, kinds[1:])) >= _CHANGES * len(run):
            return True
    return False


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with credentials replaced by ``<redacted>``.

    In URLs, credentials are user names, passwords, and parameters with a name such as ``token`` or a random value (``is_random``).
    Elsewhere they are bearer tokens, entries such as ``api_key=...``, and the values of environment variables such as ``SERVICE_TOKEN``.

    Args:
        environment: environment variables; by default those of this process.
    """
    return _replace(text, secrets(os.environ if environment is None else environment))


#: Control characters except tab and line feed, those that change the direction of text, and halves of surrogate pairs.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def show_controls(text: str) -> str:
    """Return ``text`` with control characters made visible, for terminals and pages. Texts of models, tools and data may contain any character:
    raw escape sequences would clear a terminal or change its title, and a page would hide them."""
    return _CONTROLS.sub(_show_control, text)


def _show_control(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the picture of the character
    return "\u2421" if code == 0x7F else "\ufffd" if 0xD800 <= code < 0xE000 else f"\\u{code:04x}"


class RedactingStream(io.TextIOWrapper):
    """A text stream for a process's output that redacts every line. A line is redacted when it is complete, or at ``flush``. Direct writes
    to the file descriptor, for example by C code, are not redacted."""

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
    print(show_controls(redact("".join(traceback.format_exception(kind, error, trace)))), end="", file=sys.stderr)


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
    return _NAME.search(name) is not None and _ABOUT.search(name) is None


def has_credentials(url: str) -> bool:
    """Whether a URL contains a user name, a password, or a credential-like parameter. A ``${NAME}`` placeholder does not count."""
    return redact(re.sub(r"\$\{\w+\}", "", url), {}) != re.sub(r"\$\{\w+\}", "", url)


@lru_cache(maxsize=4096)
def _holds_credential(name: str) -> bool:
    return re.fullmatch(_ENTRY, name, re.I) is not None


class RedactingFormatter(logging.Formatter):
    """A formatter whose lines, tracebacks included, hold no credentials and no control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return show_controls(redact(super().format(record)))
