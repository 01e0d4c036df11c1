"""Messages between the run and SGLang's process: JSON, and bytes beside it. Nothing is unpickled.

A frame is two little-endian uint64 lengths, a JSON object, and a payload.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

_HEAD = struct.Struct("<QQ")
#: How much asyncio reads ahead of a reader.
LIMIT = 1 << 24

#: Bytes of the two lengths.
HEAD_SIZE = _HEAD.size

Frame = tuple[dict[str, Any], bytes]


def head(message: dict[str, Any], size: int = 0) -> bytes:
    """A frame up to its payload, which has ``size`` bytes."""
    text = json.dumps(message).encode()
    return _HEAD.pack(len(text), size) + text


def sizes(start: bytes) -> tuple[int, int]:
    """(bytes of the JSON, bytes of the payload) from a frame's first ``HEAD_SIZE`` bytes."""
    text, body = _HEAD.unpack(start)
    return text, body


async def read(stream: asyncio.StreamReader) -> Frame | None:
    """The next frame; None at the end of the stream."""
    try:
        text, body = sizes(await stream.readexactly(HEAD_SIZE))
        message = json.loads(await stream.readexactly(text))
        return message, await stream.readexactly(body) if body else b""
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
