"""The protocol-buffer messages of the wire format: requests of ``forward_backward``, and the results that carry arrays.

A message is a sequence of fields. Each begins with a varint, number * 8 + type; the types used here are 0 (varint), 1 (8 bytes), 2 (a length
and as many bytes) and 5 (4 bytes). Arrays travel as little-endian bytes in one field, so decoding takes one pass over few fields.
``MESSAGES`` has the fields that the service reads; others are skipped, as the format demands.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from miles_tools.http_server import ApiError

#: DType -> numpy dtype.
DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}
#: message -> field number -> (name, type): the name of a message, "bytes", "string", "double", "int" or "ints". Fields in [] are lists.
Messages = Mapping[str, Mapping[int, tuple[str, str]]]
MESSAGES: Messages = {
    "request": {
        1: ("model_id", "string"),
        2: ("seq_id", "int"),
        3: ("data", "[datum]"),
        4: ("loss_fn", "string"),
        5: ("loss_fn_config", "[number]"),
        6: ("forward_only", "int"),
        7: ("loss_fn_config_v2", "[setting]"),
    },
    "datum": {1: ("model_input", "[chunk]"), 2: ("loss_fn_inputs", "[input]")},
    "chunk": {1: ("encoded_text", "text"), 2: ("image", "bytes"), 3: ("dmel", "bytes")},
    "text": {1: ("tokens", "bytes")},
    "input": {1: ("key", "string"), 2: ("value", "tensor")},
    "tensor": {1: ("dense", "bytes"), 2: ("sparse_csr", "bytes"), 3: ("dtype", "int"), 4: ("shape", "ints")},
    "number": {1: ("key", "string"), 2: ("value", "double")},
    "setting": {1: ("key", "string"), 2: ("value", "either")},
    "either": {1: ("number", "double"), 2: ("text", "string")},
}


def decode_request(data: bytes) -> dict[str, Any]:
    """Decode a request of ``forward_backward``: ``model_id``, ``seq_id``, ``loss_fn``, ``settings``, ``forward_only`` and ``data``, a list of
    (tokens int32 [n], inputs name -> array).

    Raises:
        ApiError: it cannot be decoded, or has images or audio, sparse tensors or settings that are texts.
    """
    try:
        found = decode(memoryview(data), "request")
        settings = {entry["key"]: entry.get("value", 0.0) for entry in found.get("loss_fn_config", ())}
        for entry in found.get("loss_fn_config_v2", ()):
            if "text" in entry["value"]:
                raise ApiError(
                    400, f"the setting {entry['key']} is a text; losses here have numbers only", "unsupported"
                )
            settings[entry["key"]] = entry["value"].get("number", 0.0)
        return {
            "model_id": found["model_id"],
            "seq_id": found["seq_id"],
            "loss_fn": found["loss_fn"],
            "forward_only": bool(found.get("forward_only")),
            "settings": settings,
            "data": [_datum(each) for each in found.get("data", ())],
        }
    except (LookupError, ValueError, TypeError, OverflowError, struct.error) as error:  # a field of another type, too
        raise ApiError(400, f"the protobuf body cannot be decoded ({error!r})", "invalid_request") from error


def _datum(found: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    chunks = found.get("model_input", ())
    if any("encoded_text" not in chunk for chunk in chunks):
        raise ApiError(400, "a datum has an image or audio; this service trains on text only", "unsupported")
    tokens = [np.frombuffer(chunk["encoded_text"].get("tokens", b""), "<i4") for chunk in chunks]
    inputs = {entry["key"]: _tensor(entry["key"], entry["value"]) for entry in found.get("loss_fn_inputs", ())}
    return np.concatenate(tokens or [np.zeros(0, "<i4")]), inputs


def _tensor(name: str, found: Mapping[str, Any]) -> np.ndarray:
    if "sparse_csr" in found:
        raise ApiError(400, f"{name} is a sparse tensor; send a dense one", "unsupported")
    array = np.frombuffer(found.get("dense", b""), DTYPES[found["dtype"]])
    return array.reshape(found["shape"]) if "shape" in found else array


def decode(data: memoryview, message: str, messages: Messages = MESSAGES) -> dict[str, Any]:
    """Decode the known fields of a message; those that are absent have no entry."""
    fields, found, at = messages[message], dict[str, Any](), 0
    while at < len(data):
        tag, at = _varint(data, at)
        value, at = _value(data, at, tag & 7)
        if tag >> 3 not in fields:
            continue
        name, kind = fields[tag >> 3]
        if kind == "ints":
            found.setdefault(name, []).extend(_varints(value) if isinstance(value, memoryview) else [value])
        elif kind.startswith("["):
            found.setdefault(name, []).append(decode(value, kind[1:-1], messages))
        else:
            found[name] = decode(value, kind, messages) if kind in messages else _convert(value, kind)
    return found


def _convert(value: Any, kind: str) -> Any:
    if kind == "int":
        return value
    if kind == "double":
        return struct.unpack("<d", value)[0]
    return str(value, "utf-8") if kind == "string" else bytes(value)


def _value(data: memoryview, at: int, kind: int) -> tuple[Any, int]:
    if kind == 0:
        return _varint(data, at)
    length, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
    if at + length > len(data):
        raise ValueError("it is cut off")
    return data[at : at + length], at + length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _varints(data: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def encode_gradients(log_probs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encode a ``ForwardBackwardOutput`` with the field ``logprobs``, one float32 array per datum.

    The arrays are one record, a map of field name to batched tensor: all values one after another (1), the byte offsets of the arrays (2)
    and the type (3). The output is the kind of record (1), the record (2) and a map of metrics (3).
    """
    sizes = np.cumsum([0, *(array.nbytes for array in log_probs)], dtype="<i8")
    batched = _join(
        [_block(1, np.concatenate(log_probs).astype("<f4").tobytes()), _block(2, sizes.tobytes()), _number(3, 1)]
    )
    record = _join([_block(2, _join([_block(1, b"logprobs"), _block(2, batched)])), _number(3, len(log_probs))])
    named = [
        _block(3, _join([_block(1, name.encode()), bytes([2 << 3 | 1]), struct.pack("<d", value)]))
        for name, value in metrics.items()
    ]
    return _join([_block(1, b"ArrayRecord"), _block(2, record), *named])


def encode_samples(
    sequences: Sequence[tuple[np.ndarray, np.ndarray, bool]], prompt_log_probs: np.ndarray | None
) -> bytes:
    """Encode a ``SampleResponse``.

    Args:
        sequences: tokens, log-probabilities, and whether the limit of tokens ended the response.
        prompt_log_probs: [prompt], NaN for the first token; None if they were not requested.
    """
    parts = [
        _block(
            1,
            _join(
                [
                    _number(1, int(cut)),
                    _block(2, tokens.astype("<i4").tobytes()),
                    _block(3, scores.astype("<f4").tobytes()),
                ]
            ),
        )
        for tokens, scores, cut in sequences
    ]
    if prompt_log_probs is not None:
        parts.append(_block(2, prompt_log_probs.astype("<f4").tobytes()))
    return _join(parts)


def _join(parts: Iterable[bytes]) -> bytes:
    return b"".join(parts)


def _block(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _encode_varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return bytes([number << 3]) + _encode_varint(value)


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
