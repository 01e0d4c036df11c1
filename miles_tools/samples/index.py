"""Reads single samples of a file: an index holds where each one begins, so that a page can show any of them without reading all.

A file consists of gzip members of some hundred samples each. A place is the offset of a member in the file, and the position of a line in
the member's text.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

#: Bytes that are read from a file at once.
_CHUNK = 1 << 16
#: What a damaged file raises.
DAMAGE = (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class Place(NamedTuple):
    """Where a sample is: offset of its gzip member in the file, and start and length of its line in the member's text, in bytes."""

    member: int
    start: int
    length: int


def read_lines(path: Path) -> Iterator[tuple[Place, bytes]]:
    """Yield the place and the JSON text of each sample of a file, holding one at a time.

    Raises:
        OSError: the file cannot be read.
        EOFError: it is empty or incomplete.
        zlib.error: it is not a gzip file.
    """
    with path.open("rb") as file:
        member, data = 0, file.read(_CHUNK)
        if not data:
            raise EOFError("it is empty")
        while data:
            decoder = zlib.decompressobj(31)
            used = start = 0
            text = b""
            while True:
                *lines, text = (text + decoder.decompress(data)).split(b"\n")
                used += len(data) - len(decoder.unused_data)
                for line in lines:
                    yield Place(member, start, len(line)), line
                    start += len(line) + 1
                if decoder.eof:
                    break
                if not (data := file.read(_CHUNK)):
                    raise EOFError("it is incomplete")
            if text:
                yield Place(member, start, len(text)), text
            member += used
            data = decoder.unused_data or file.read(_CHUNK)


def read_at(path: Path, place: Place) -> dict[str, Any]:
    """Return the sample at a place.

    Raises:
        any of DAMAGE: the file is damaged, or another one than when the place was found.
    """
    decoder = zlib.decompressobj(31)
    text, skip = b"", place.start
    with path.open("rb") as file:
        file.seek(place.member)
        while len(text) < skip + place.length:
            if not (data := file.read(_CHUNK)):
                raise EOFError("it is incomplete")
            text += decoder.decompress(data)
            if len(text) <= skip:
                text, skip = b"", skip - len(text)
    return dict(json.loads(text[skip : skip + place.length]))
