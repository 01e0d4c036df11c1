"""Prompt files, read row by row: JSONL, and parquet with the part ``prompt_file: parquet`` of an installed plugin.

A JSONL file is scanned once to record the offset of every row; rows are read from disk on demand, so the text is never completely in
memory. ``file@[a:b]`` selects a part with the semantics of Python slices. Of large files, a sample of the rows is checked before the
run (``prompt_index``), and the others are checked when they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from miles_core.data import hub
from miles_core.data.media import explain_media, find_media
from miles_core.data.prompt_index import load_index, sample_rows, store_index
from miles_core.errors import DataError
from miles_core.text import load_strict_json

SLICED = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
SLICE = re.compile(r"(.+)@\[[^\]]*\]")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
Check = Callable[[dict[str, Any], str], None]

#: Number of bytes of a JSONL file that are read at once.
_BLOCK = 1 << 25
#: Whether ``bytes.strip`` removes a byte, bool [256].
_BLANK = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


class ChangedFileError(DataError):
    """A file that the run reads was changed."""


class PromptFile(Protocol):
    """Rows as dicts with their location (``file:line``), and a digest of all rows."""

    digest: str
    path: Path

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[dict[str, Any], str]: ...


#: Opens a file of another format: path, selected part, columns in use, check of a row, whether rows may hold media.
Opener = Callable[[Path, slice, Sequence[str], Check, bool], PromptFile]


def open_prompt_file(
    spec: str, columns: Sequence[str], check: Check, meaning: str, open_parquet: Opener | None, media: bool = False
) -> PromptFile:
    """Open ``path`` or ``path@[a:b]``, where a path may be ``hf://datasets/ORG/NAME/FILE``.

    ``check(row, place)`` is called once with every row of ``sample_rows``, unless a run with the same ``meaning`` of the columns has
    checked a large file.

    Raises:
        DataError: no such file, unknown kind, a row that cannot be read, or what ``check`` raises.
    """
    match = SLICED.fullmatch(spec)
    part = slice(None)
    if match:
        part = slice(*(int(match[name]) if match[name] else None for name in ("start", "stop")))
    named = match["path"] if match else spec
    path = hub.file(named) if named.startswith("hf://") else Path(named)
    try:
        there = path.exists()
    except (OSError, ValueError) as error:
        raise DataError(f"{named[:80]} names no prompt file: {error}") from error
    if not there:
        part_of = SLICE.fullmatch(named)
        hint = (
            f"; {part_of[1]} is there: write a part as @[a:b], with whole numbers"
            if part_of and Path(part_of[1]).is_file()
            else ""
        )
        hint = "; it is an address: download the file, or give hf://datasets/ORG/NAME/FILE" if "://" in named else hint
        raise DataError(f"there is no prompt file {named} (looked in {Path.cwd()}){hint}")
    if path.is_dir():
        raise DataError(f"{path} is a directory; name the prompt file in it (.jsonl or .parquet)")
    if path.suffix == ".parquet" and open_parquet is not None:
        return open_parquet(path, part, columns, check, media)
    if path.suffix in JSON_SUFFIXES:
        return JsonlFile(path, part, check, meaning)
    raise DataError(
        f"{path}: prompts are read from .jsonl or .parquet files, not {path.suffix or 'files without suffix'}"
    )


class JsonlFile:
    """A file with one JSON object per line, in UTF-8; blank lines are skipped. The file stays open, so it may be moved or deleted
    during a run; reading raises DataError if its content changes."""

    def __init__(self, path: Path, part: slice, check: Check, meaning: str) -> None:
        self.path = path
        self._file = path.open("rb")
        self._seen, self._clean = self._state(), True  # clean: each row is a line without blanks at its ends
        key = ("jsonl", str(path.resolve()), self._seen, str(part), meaning)
        # [rows + 2, 3] int64: first byte, bytes and line of each row; the digest and _clean are stored in the last two
        stored = load_index(*key)
        if stored is not None:
            end = stored[-2:].tobytes()
            self._rows, self.digest, self._clean = stored[:-2], end[:32].hex(), bool(end[32])
            return
        self._rows = self._scan()[part]
        self.digest = self._digest()
        for index in sample_rows(len(self)):
            check(*self.read(index))
        end = bytes.fromhex(self.digest) + bytes([self._clean]) + bytes(15)
        store_index(np.concatenate([self._rows, np.frombuffer(end, np.int64).reshape(2, 3)]), *key)

    def _scan(self) -> np.ndarray:
        """Return first byte, bytes and line of every row, int64 [rows, 3]."""
        found, position, number = [np.zeros((0, 3), np.int64)], 0, 1
        with self.path.open("rb") as file:
            while block := file.read(_BLOCK) + file.readline():
                text = np.frombuffer(block if block.endswith(b"\n") else block + b"\n", np.uint8)
                ends = np.flatnonzero(text == ord("\n")) + 1
                starts = np.append(0, ends[:-1])
                blank = _BLANK[text[starts]]
                self._clean &= not (blank | _BLANK[text[ends - 2]]).any()
                blank[blank] = [
                    not block[start:end].strip() for start, end in zip(starts[blank], ends[blank], strict=True)
                ]
                sizes, lines = np.minimum(ends, len(block)) - starts, number + np.arange(len(ends))
                found.append(np.stack([position + starts, sizes, lines], axis=1)[~blank])
                position, number = position + len(block), number + len(ends)
        return np.concatenate(found)

    def _digest(self) -> str:
        """Return the SHA-256 of the rows, each without blanks at its ends and with a newline."""
        digest = hashlib.sha256()
        if not self._clean:
            for index in range(len(self)):
                digest.update(self._line(index).strip() + b"\n")
        elif len(self):
            start, stop = int(self._rows[0, 0]), int(self._rows[-1, :2].sum())
            for at in range(start, stop, _BLOCK):
                digest.update(os.pread(self._file.fileno(), min(_BLOCK, stop - at), at))
            digest.update(b"" if self._line(-1).endswith(b"\n") else b"\n")
        return digest.hexdigest()

    def _line(self, index: int) -> bytes:
        start, size, _ = self._rows[index].tolist()
        return os.pread(self._file.fileno(), size, start)

    def _state(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> tuple[dict[str, Any], str]:
        """Return row ``index`` and its location."""
        if self._state() != self._seen:
            if self._digest() != self.digest:
                raise ChangedFileError(
                    f"{self.path} was changed while the run reads it, row by row; put back what it held, or use another file for "
                    "the next run"
                )
            self._seen = self._state()
        number = int(self._rows[index, 2])
        return self._parse(self._line(index), number), f"{self.path}:{number}"

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        place = f"{self.path}:{number}"
        try:
            row = load_strict_json(line.removeprefix(BOM_UTF8).decode())
        except UnicodeDecodeError as error:
            raise DataError(
                f"{place}: not UTF-8 (byte {error.start} of the line); convert the file to UTF-8"
            ) from error
        except json.JSONDecodeError as error:
            hint = "; write one object per line, not one array" if number == 1 and line.lstrip()[:1] == b"[" else ""
            raise DataError(f"{place}: malformed JSON: {error.msg} at column {error.colno}{hint}") from error
        except (
            ValueError,
            RecursionError,
        ) as error:  # a number with thousands of digits, or nesting a thousand levels deep
            raise DataError(f"{place}: this JSON cannot be read ({error}); correct or remove the row") from error
        if not isinstance(row, dict):
            raise DataError(f"{place}: a row must be a JSON object with keys, this is {_kind(row)}")
        return row


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return names.get(type(value), "null")


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
