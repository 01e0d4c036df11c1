"""Messages between the run and SGLang's process: JSON with an optional binary payload, no pickle.

A frame is two little-endian uint64 lengths, a JSON object, and the payload.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

_HEAD = struct.Struct("<QQ")
#: Maximum bytes that asyncio buffers ahead of the reader.
LIMIT = 1 << 24

Frame = tuple[dict[str, Any], bytes]


def head(message: dict[str, Any], size: int = 0) -> bytes:
    """Encode a frame without its payload of ``size`` bytes."""
    text = json.dumps(message).encode()
    return _HEAD.pack(len(text), size) + text


async def read(stream: asyncio.StreamReader) -> Frame | None:
    """Read the next frame; None at the end of the stream."""
    try:
        text, body = _HEAD.unpack(await stream.readexactly(_HEAD.size))
        message = json.loads(await stream.readexactly(text))
        return message, await stream.readexactly(body) if body else b""
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive(connection: socket.socket) -> Frame | None:
    """Read the next frame from a blocking socket; None at the end of the stream."""
    start = _exactly(connection, _HEAD.size)
    if start is None:
        return None
    text, body = _HEAD.unpack(start)
    message, payload = _exactly(connection, text), _exactly(connection, body)
    return None if message is None or payload is None else (json.loads(message), payload)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        piece = connection.recv(min(count - len(found), LIMIT))
        if not piece:
            return None
        found += piece
    return bytes(found)
