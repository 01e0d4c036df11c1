"""Messages between two processes: JSON and tensors as bytes.

A frame consists of two little-endian uint32 lengths, a JSON object and safetensors bytes. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import numpy as np
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.data.column import Column

_HEAD = struct.Struct("<II")


def pack(message: dict[str, Any], payload: bytes = b"") -> bytes:
    """Encode one frame."""
    head = json.dumps(message).encode()
    return _HEAD.pack(len(head), len(payload)) + head + payload


async def read(stream: asyncio.StreamReader) -> tuple[dict[str, Any], bytes] | None:
    """Read the next frame; None at the end of the stream."""
    try:
        head, body = _HEAD.unpack(await stream.readexactly(_HEAD.size))
        message = json.loads(await stream.readexactly(head))
        return message, await stream.readexactly(body)
    except asyncio.IncompleteReadError:
        return None


def pack_request(request: Request) -> dict[str, Any]:
    """Convert a request to JSON; ``metadata`` must be JSON-serialisable."""
    return {
        "tokens": list(request.tokens),
        "sampling": vars(request.sampling),
        "key": request.key,
        "group": request.group,
        "extras": sorted(request.extras),
        "metadata": request.metadata,
    }


def unpack_request(data: dict[str, Any]) -> Request:
    """Invert ``pack_request``."""
    sampling: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["sampling"].items()}
    return Request(**{**data, "sampling": Sampling(**sampling), "extras": set(data["extras"])})


def pack_response(response: Response) -> tuple[dict[str, Any], bytes]:
    """Convert a response to JSON and its extras to safetensors; a ragged field becomes its values and row lengths."""
    arrays: dict[str, np.ndarray] = {}
    for name, rows in response.extras.items():
        if isinstance(rows, list):
            arrays[f"{name}/lengths"] = np.array([len(r) for r in rows], np.int64)
            arrays[f"{name}/values"] = np.concatenate(rows) if rows else np.zeros(0, np.int32)
        else:
            arrays[name] = np.ascontiguousarray(rows)
    plain = {k: v.tolist() if isinstance(v, Column) else v for k, v in vars(response).items() if k != "extras"}
    return plain, save_arrays(arrays)


def unpack_response(data: dict[str, Any], payload: bytes) -> Response:
    """Invert ``pack_response``."""
    arrays = load_arrays(payload)
    extras: dict[str, Any] = {}
    for name, array in arrays.items():
        field, _, part = name.partition("/")
        if part == "lengths":
            extras[field] = np.split(arrays[f"{field}/values"], array.cumsum()[:-1]) if len(array) else []
        elif not part:
            extras[field] = array
    versions = [(int(index), int(version)) for index, version in data.pop("weight_versions")]
    return Response(**data, weight_versions=versions, extras=extras)
