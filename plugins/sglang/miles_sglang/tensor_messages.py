"""Messages with weights to a running server, which has none of this plugin's code: tensors as bytes, with a checksum.

SGLang unpickles the tensors that it receives over HTTP, but calls functions of a few modules only (``SafeUnpickler``). The pickles here contain
no handle of shared or GPU memory: they call functions of torch that view the bytes of the message as tensors. Before that they compare the
checksum of the bytes, so a server whose message was damaged ends with an error instead of loading it.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from safetensors.torch import load

from miles_sglang.buckets import Bucket

#: Maximum bytes of weights in a message, over all ranks: it holds a copy per rank, in base64, and SGLang decodes it at once.
MESSAGE_BYTES = 128 << 20
#: The endpoints whose bodies contain tensors.
ENDPOINTS = ("update_weights_from_tensor", "load_lora_adapter_from_tensors")
_DAMAGED = "miles: the weights in this message differ from those sent"
#: Keys of an update that the plugin's own code in SGLang reads.
_OWN = ("tensors", "size", "copies")


def encode(endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview, ranks: int) -> bytes:
    """Return the JSON text of a call of one of ``ENDPOINTS``.

    Args:
        endpoint: name of the endpoint.
        body: its arguments without the tensors.
        payload: the tensors: a bucket, which ``body`` describes (``buckets.Flat.message``), or an adapter as a safetensors file.
        ranks: number of SGLang's tensor-parallel ranks. Each rank receives all tensors.
    """
    if endpoint == "update_weights_from_tensor":
        content: Any = _pack(body["tensors"], payload)
    else:
        bucket = Bucket()
        for name, tensor in load(bytes(payload)).items():
            bucket.add(name, tensor)
        flat = bucket.flatten()
        content = _Call(dict, _pack(flat.tensors, flat.array.numpy().data))
    text = base64.b64encode(pickle.dumps(content)).decode()
    kept = {name: value for name, value in body.items() if name not in _OWN}
    return json.dumps({**kept, "serialized_named_tensors": [text] * ranks}).encode()


class _Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *args: Any, **named: Any) -> None:
        self._reduced = (partial(function, **named) if named else function), args

    def __reduce__(self) -> Any:
        return self._reduced


def checksum(payload: bytearray) -> int:
    """Return the checksum of bytes whose length is a multiple of 8. It differs if one word does, or if two are exchanged."""
    words = torch.frombuffer(payload, dtype=torch.int64)
    return int(torch.sum(torch.mul(words, torch.arange(1, 2 * len(words), 2))))


def _pack(tensors: Sequence[Sequence[Any]], payload: bytes | memoryview) -> Any:
    """Return what pickles as a list of (name, tensor), and compares the checksum when it is unpickled."""
    if not tensors:
        return []
    data = bytearray(payload) + bytes(-len(payload) % 8)  # one object, which the pickle contains once
    words = _Call(torch.frombuffer, data, dtype=torch.int64)
    weighted = _Call(torch.mul, words, _Call(torch.arange, 1, len(data) // 4, 2))
    sums = _Call(torch.sum, weighted), _Call(torch.tensor, checksum(data))
    compared = _Call(torch.testing.assert_close, *sums, rtol=0, atol=0, msg=_DAMAGED)
    pairs = [(name, _view(data, dtype, shape, offset)) for name, dtype, shape, offset in tensors]
    return _Call(list, _Call(filter, None, [compared, *pairs]))  # without the None that the comparison returns


def _view(data: bytearray, dtype: str, shape: Sequence[int], offset: int) -> _Call:
    flat = _Call(torch.frombuffer, data, dtype=getattr(torch, dtype), count=math.prod(shape), offset=offset)
    return _Call(torch.reshape, flat, tuple(shape))
