"""Prompt files: JSONL and parquet, read row by row.

A JSONL file is scanned once to check every row and record its offset; rows are read from disk on demand, so the text is never
completely in memory. For a parquet file, the columns in use are kept in memory as an Arrow table. ``file@[a:b]`` selects a part
with the semantics of Python slices.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from miles_core.data import hub
from miles_core.data.media import explain_media, is_empty, is_media_key
from miles_core.data.prompt_index import load_index, store_index
from miles_core.data.strict_json import load_strict_json
from miles_core.errors import DataError

SLICED = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
SLICE = re.compile(r"(.+)@\[[^\]]*\]")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
Check = Callable[[dict[str, Any], str], None]


class PromptFile(Protocol):
    """Rows as dicts with their location (``file:line``), and a digest of all rows."""

    digest: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[dict[str, Any], str]: ...


def open_prompt_file(spec: str, columns: Sequence[str], check: Check, meaning: str) -> PromptFile:
    """Open ``path`` or ``path@[a:b]``, where a path may be ``hf://datasets/ORG/NAME/FILE``.

    ``check(row, place)`` is called once with every row, unless a run with the same ``meaning`` of the columns has checked a large file.

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
    if path.suffix == ".parquet":
        return ParquetFile(path, part, columns, check)
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
        self._seen = self._state()
        key = ("jsonl", str(path.resolve()), self._seen, str(part), meaning)
        rows = load_index(
            *key
        )  # [rows + 2, 3] int64: first byte, bytes and line of each row; the digest is stored in the last two
        if rows is None:
            self._rows = self._scan()[part]
            self.digest = self._digest(check)
            digest = np.frombuffer(bytes.fromhex(self.digest) + bytes(16), np.int64).reshape(2, 3)
            store_index(np.concatenate([self._rows, digest]), *key)
        else:
            self._rows, self.digest = rows[:-2], rows[-2:].tobytes()[:32].hex()

    def _scan(self) -> np.ndarray:
        found, position = array("q"), 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    found.extend((position, len(line), number))
                position += len(line)
        return np.asarray(found).reshape(-1, 3)

    def _digest(self, check: Check | None = None) -> str:
        digest = hashlib.sha256()
        for index, number in enumerate(self._rows[:, 2].tolist()):
            line = self._line(index)
            digest.update(line.strip() + b"\n")
            if check is not None:
                check(self._parse(line, number), f"{self.path}:{number}")
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
                raise DataError(
                    f"{self.path} was changed while the run reads it, row by row; put back what it held, or use another file for "
                    "the next run"
                )
            self._seen = self._state()
        number = int(self._rows[index, 2])
        return self._parse(self._line(index), number), f"{self.path}:{number}"

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        place = f"{self.path}:{number}"
        try:
            row = load_strict_json(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{place}: not UTF-8 (byte {error.start} of the line); convert the file to UTF-8"
            ) from error
        except json.JSONDecodeError as error:
            hint = "; write one object a line, not one array" if number == 1 and line.lstrip()[:1] == b"[" else ""
            raise DataError(f"{place}: malformed JSON: {error.msg} at column {error.colno}{hint}") from error
        except (
            ValueError,
            RecursionError,
        ) as error:  # a number with thousands of digits, or nesting a thousand levels deep
            raise DataError(f"{place}: this JSON cannot be read ({error}); correct or remove the row") from error
        if not isinstance(row, dict):
            raise DataError(f"{place}: a row must be a JSON object with keys, this is {_kind(row)}")
        return row


class ParquetFile:
    """A parquet file; values that JSON cannot express (dates, decimals) become strings. Media columns are scanned only for the first
    non-empty value, which is an error."""

    def __init__(self, path: Path, part: slice, columns: Sequence[str], check: Check) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise DataError(f"{path}: parquet files are read with pyarrow; install it (pip install pyarrow)") from error
        self.path = path
        try:
            file = pq.ParquetFile(path)
            self._names = file.schema_arrow.names
            if twice := [name for name in columns if self._names.count(name) > 1]:
                raise DataError(
                    f"{path}: it has {self._names.count(twice[0])} columns {twice[0]!r}; rename all but one"
                )
            table = file.read([name for name in columns if name in self._names])
            self._first, stop, _ = part.indices(file.metadata.num_rows)
            for name in self._names:
                if name not in columns and is_media_key(name):
                    _refuse_filled(file, name, path, range(self._first, stop))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable parquet file: {error}") from error
        self._count = max(0, stop - self._first)
        self._table = table.slice(self._first, self._count)
        digest = hashlib.sha256(f"{self._first}:{self._count}".encode())
        with path.open("rb") as raw:
            while block := raw.read(1 << 20):
                digest.update(block)
        self.digest = digest.hexdigest()
        for index in range(self._count):
            check(*self.read(index))

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> tuple[dict[str, Any], str]:
        """Return row ``index`` and its location; columns that were not requested are present with the value None."""
        place = f"{self.path} row {self._first + index}"
        row: dict[str, Any] = dict.fromkeys(self._names)
        for name in self._table.column_names:
            try:
                row[name] = json.loads(json.dumps(self._table.column(name)[index].as_py(), default=_text))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{place}: the column {name!r} holds bytes that are not UTF-8 text; store it as a string"
                ) from error
            except (
                ValueError,
                TypeError,
                OverflowError,
            ) as error:  # timestamps outside the resolution or range of Python's
                raise DataError(
                    f"{place}: the column {name!r} cannot be read ({error}); store it as a string"
                ) from error
        return row, place


def _refuse_filled(file: Any, name: str, path: Path, rows: range) -> None:
    """Raise DataError for the first of ``rows`` whose media column ``name`` is not empty."""
    index = 0
    for batch in file.iter_batches(batch_size=16, columns=[name]):
        for value in batch.column(0):
            if index in rows and not is_empty(value.as_py()):
                raise DataError(explain_media(f"{path} row {index}", f"the column {name!r} is not empty"))
            index += 1


def _text(value: Any) -> str:
    """Convert a value that JSON cannot express to a string; binary columns usually hold UTF-8 text."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return names.get(type(value), "null")
