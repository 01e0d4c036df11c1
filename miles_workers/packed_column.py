"""Values of one attribute of many samples as few bytes, so that a message contains them once per group instead of once per sample.

The packed form of n values is plain data: ``(value,)`` if all are equal, ``(start, step)`` for equally spaced integers, ``(code, bytes)``
for numbers of one type, ``(kind, length or keys, columns)`` for containers of one shape, and otherwise a list of the values. Types and bits
of the values are preserved: 1, 1.0 and True differ, and so do 0.0 and -0.0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

#: See the module; its type is plain data.
Packed = Any

#: Type codes of ``struct`` for integers, with the largest absolute value that each holds.
_INTEGERS = (("b", 1 << 7), ("h", 1 << 15), ("i", 1 << 31), ("q", 1 << 63))
#: Types that hold some floats in fewer bytes, by code.
_SHORT: dict[str, np.dtype[Any]] = {"e": np.dtype("<f2"), "f": np.dtype("<f4")}
_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", dict: "dict"}
_TYPES = {*_CONTAINERS}


def pack_column(values: Sequence[Any]) -> Packed:
    """Pack the values of at least one sample."""
    first = values[0]
    kind = type(first)
    if not all(type(value) is kind for value in values):
        return list(values)
    if kind is int:
        return _pack_integers(values)
    if kind is float:
        return _pack_floats(values)
    if kind in _CONTAINERS:
        return _pack_containers(values, kind)
    if isinstance(first, (np.number, np.bool_)):
        return first.dtype.str, np.array(values).tobytes()
    if kind in (str, bool, type(None)) and all(value == first for value in values):
        return (first,)
    return list(values)


def unpack_column(packed: Packed, count: int) -> list[Any]:
    """Inverse of ``pack_column`` for ``count`` values. Containers are new objects."""
    if type(packed) is list:
        return packed
    if len(packed) == 1:
        (value,) = packed
        if type(value) not in _CONTAINERS:
            return [value] * count
        if type(value) is list and all(type(each) is tuple and not {*map(type, each)} & _TYPES for each in value):
            return [value[:] for _ in range(count)]
        return [_copy(value) for _ in range(count)]
    if len(packed) == 3:
        kind, shape, columns = packed
        return _unpack_containers(kind, shape, columns, count)
    code, data = packed
    if type(code) is int:
        return list(range(code, code + count * data, data))
    return list(struct.unpack(f"<{count}{code}", data) if len(code) == 1 else np.frombuffer(data, code))


def _pack_integers(values: Sequence[int]) -> Packed:
    first, count = values[0], len(values)
    if count == 1:
        return (first,)
    step = values[1] - first
    if step == 0 and values.count(first) == count:
        return (first,)
    if step and list(values) == list(range(first, first + count * step, step)):
        return first, step
    low, high = min(values), max(values)
    for code, limit in _INTEGERS:
        if -limit <= low and high < limit:
            return code, struct.pack(f"<{count}{code}", *values)
    return list(values)


def _pack_floats(values: Sequence[float]) -> Packed:
    data = struct.pack(f"<{len(values)}d", *values)
    if data == data[:8] * len(values):
        return (values[0],)
    for code, kind in _SHORT.items():
        with np.errstate(over="ignore"):
            short = np.array(values).astype(kind)
        if short.astype(np.float64).tobytes() == data:
            return code, short.tobytes()
    return "d", data


def _pack_containers(values: Sequence[Any], kind: type) -> Packed:
    shape = tuple(values[0]) if kind is dict else len(values[0])
    if any((tuple(value) if kind is dict else len(value)) != shape for value in values):
        return list(values)
    rows = [value.values() for value in values] if kind is dict else values
    columns = [pack_column(column) for column in zip(*rows, strict=True)]
    if all(type(column) is tuple and len(column) == 1 for column in columns):
        return (values[0],)
    return _CONTAINERS[kind], shape, columns


def _unpack_containers(kind: str, shape: Any, columns: Sequence[Packed], count: int) -> list[Any]:
    rows = zip(*(unpack_column(column, count) for column in columns), strict=True)
    if kind == "dict":
        return [dict(zip(shape, row, strict=True)) for row in rows]
    return list(rows) if kind == "tuple" else [list(row) for row in rows]


def _copy(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copy(each) for key, each in value.items()}
    return type(value)(map(_copy, value)) if type(value) in (list, tuple) else value


class IndexList(list[int]):
    """A list that travels to another process in packed form and arrives there as a plain list. Runs of consecutive numbers take a
    few bytes each."""

    def __reduce__(self) -> tuple[Any, ...]:
        if not self:
            return list, ()
        numbers = np.array(self, np.int64)
        starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
        if 2 * len(starts) > len(numbers):
            return unpack_column, (pack_column(self), len(self))
        lengths = np.diff(starts, append=len(numbers))
        return _join_runs, (pack_column(numbers[starts].tolist()), pack_column(lengths.tolist()), len(starts))


def _join_runs(starts: Packed, lengths: Packed, count: int) -> list[int]:
    runs = zip(unpack_column(starts, count), unpack_column(lengths, count), strict=True)
    return [number for start, length in runs for number in range(start, start + length)]
