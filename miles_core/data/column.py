"""A column: one number per token, stored as an array.

It behaves like a list of Python numbers (slices, ``+``, ``append``, ``==``), and numpy reads it without a copy: ``np.asarray(column)``.
While such a view exists, the column cannot grow. A token takes 4 bytes, a log-probability 8 and an entry of a mask 1; a list takes 8
bytes and an object for each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from miles_core.errors import describe

#: Type of an attribute that is read as a column (or None) and set to any sequence of numbers: type checkers know no such type.
ColumnField = Any
#: Type codes of ``array`` and numpy: int32, float64 and int8.
TOKENS, FLOATS, MASK = "i", "d", "b"
#: Kinds of numpy arrays that fit them.
_KINDS = {TOKENS: "iu", FLOATS: "f", MASK: "iu"}


class Column(array):  # type: ignore[type-arg]
    """``Column(TOKENS, [3, 1])``. Equal to a list, a tuple or a column with the same numbers."""

    __hash__ = None
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, array):
            return bool(array.__eq__(self, other))
        if not isinstance(other, (list, tuple)):
            return NotImplemented
        return len(self) == len(other) and self.tolist() == list(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, index: Any) -> Any:
        found = array.__getitem__(self, index)
        return Column(self.typecode, found) if isinstance(index, slice) else found

    def __add__(self, other: Iterable[Any]) -> Column:
        made = Column(self.typecode, self)
        made.extend(other)
        return made

    def __radd__(self, other: Iterable[Any]) -> Column:
        return Column(self.typecode, other).__iadd__(self)

    def __iadd__(self, other: Iterable[Any]) -> Column:
        self.extend(other)
        return self

    def __copy__(self) -> Column:
        return Column(self.typecode, self)

    def __deepcopy__(self, _: Any) -> Column:
        return Column(self.typecode, self)

    def __repr__(self) -> str:
        return repr(self.tolist())

    @classmethod
    def of(cls, values: np.ndarray, typecode: str) -> Column:
        """Copy a numpy array [n]."""
        return cls(typecode, values.astype(typecode).tobytes())


def join_columns(columns: Iterable[Column], typecode: str = TOKENS) -> Column:
    """Concatenate columns to a new one."""
    joined = Column(typecode)
    for column in columns:
        joined.extend(column)
    return joined


def are_columns(values: Sequence[Any]) -> bool:
    """Whether all of at least one values are columns of the same type."""
    return {*map(type, values)} == {Column} and len({value.typecode for value in values}) == 1


def concatenate(values: Sequence[Any], dtype: Any) -> np.ndarray:
    """Concatenate arrays and sequences of numbers; [0] if there are none."""
    if are_columns(values):  # many short columns in a fraction of the time
        return np.frombuffer(bytearray().join(values), values[0].typecode).astype(dtype, copy=False)
    return np.concatenate([np.asarray(value, dtype) for value in values] or [np.zeros(0, dtype)])


def as_column(values: Any, typecode: str) -> Any:
    """Convert a list, a tuple or a numpy array [n] of numbers. Other values, and those that do not fit the type, are returned as they are:
    the check of their owner describes them."""
    if type(values) is Column:
        return values
    if type(values) not in (list, tuple):
        fits = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in _KINDS[typecode]
        return Column.of(values, typecode) if fits else values
    try:
        return Column(typecode, values)
    except (TypeError, OverflowError):
        return values


def find_token_fault(tokens: Sequence[Any], vocabulary: int) -> str:
    """Describe tokens that are not all token ids below ``vocabulary``; "" if they are."""
    size = min(vocabulary, 1 << 31)
    if isinstance(tokens, Column):
        ids = np.asarray(tokens).view(np.uint32)  # negative numbers are large ones
        if not len(ids) or np.maximum.reduce(ids) < size:
            return ""
    wrong = next(t for t in tokens if not isinstance(t, int) or not 0 <= t < size)
    return f"the token {wrong!r} in {describe(tokens)}; expected token ids, integers from 0 to {size - 1}"
