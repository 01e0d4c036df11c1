"""Parquet files of prompts. The columns in use are kept in memory as an Arrow table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.data.media import explain_media, is_empty, is_media_key
from miles_core.data.media_reader import media_columns
from miles_core.data.prompt_file import Check
from miles_core.data.prompt_index import sample_rows
from miles_core.data.prompts import find_column
from miles_core.errors import DataError


class ParquetFile:
    """A parquet file; values that JSON cannot express become strings (dates) or numbers (decimals). Columns of images are read with ``media``;
    other media columns are scanned only for the first non-empty value, which is an error."""

    def __init__(self, path: Path, part: slice, columns: Sequence[str], check: Check, media: bool = False) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise DataError(f"{path}: parquet files are read with pyarrow; install it (pip install pyarrow)") from error
        self.path = path
        try:
            file = pq.ParquetFile(path)
            self._names = file.schema_arrow.names
            used = [find_column(key, self._names) for key in columns]
            self._images = [name for name in media_columns(self._names) if media and name not in used]
            columns = [*dict.fromkeys(used + self._images)]
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
        for index in sample_rows(self._count):
            check(*self.read(index))

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> tuple[dict[str, Any], str]:
        """Return row ``index`` and its location; columns that were not requested are present with the value None."""
        place = f"{self.path} row {self._first + index}"
        row: dict[str, Any] = dict.fromkeys(self._names)
        for name in self._table.column_names:
            try:
                value = self._table.column(name)[index]
                if name in self._images:
                    row[name] = value.as_py()
                    continue
                row[name] = json.loads(json.dumps(_shorten(value.as_py(), value.type), default=_convert))
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


def _shorten(value: Any, kind: Any) -> Any:
    """Convert numbers of 32 and 16 bits to the floats with their digits: a float32 of 0.1 is 0.1, and not 0.10000000149011612."""
    import pyarrow.types as types

    if value is None:
        return None
    if types.is_float32(kind) or types.is_float16(kind):
        return float(str(np.float16(value) if types.is_float16(kind) else np.float32(value)))
    if types.is_struct(kind):
        return {field.name: _shorten(value[field.name], field.type) for field in kind}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_shorten(item, kind.value_type) for item in value]
    return value


def _convert(value: Any) -> Any:
    """Convert a value that JSON cannot express: a decimal to the same number, or to text if no float equals it; binary columns usually hold
    UTF-8 text."""
    if isinstance(value, Decimal):
        if value == value.to_integral_value():
            return int(value)
        return float(value) if Decimal(repr(float(value))) == value else str(value)
    return value.decode() if isinstance(value, bytes) else str(value)
