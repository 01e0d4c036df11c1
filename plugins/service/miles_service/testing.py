"""A client for tests, which sends the requests of the wire format without the package ``tinker``."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection
from typing import Any

import numpy as np

from miles_testing.toy import toy_files

TOKEN = "tml-of-the-tests"


def block(number: int, data: bytes) -> bytes:
    """Encode a field of bytes."""
    size, out = len(data), bytearray([number << 3 | 2])
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes(out) + bytes([size]) + data


def forward_backward(
    model: str,
    number: int,
    data: Sequence[tuple[Sequence[int], Mapping[str, Sequence[float]]]],
    loss: str,
    settings: Mapping[str, float] | None = None,
    forward_only: bool = False,
) -> bytes:
    """Encode a request; ``data``: (tokens, inputs name -> list)."""
    out = block(1, model.encode()) + bytes([16, number]) + block(4, loss.encode()) + bytes([48, forward_only])
    for name, value in (settings or {}).items():
        out += block(7, block(1, name.encode()) + block(2, bytes([9]) + struct.pack("<d", value)))
    for tokens, inputs in data:
        datum = block(1, block(1, block(1, np.asarray(tokens, "<i4").tobytes())))
        for name, values in inputs.items():
            kind = 2 if name == "target_tokens" else 1
            tensor = block(1, np.asarray(values, "<i8" if kind == 2 else "<f4").tobytes()) + bytes([24, kind])
            datum += block(2, block(1, name.encode()) + block(2, tensor))
        out += block(3, datum)
    return out


class Client:
    """One client with a session."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self.host, self.token = address.removeprefix("http://"), token
        status, body = self.send("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})
        self.session = body["session_id"] if status == 200 else None
        self.models, self.samplers = 0, 0

    def send(self, path: str, body: Any) -> tuple[int, Any]:
        """Send a request; return the status and the reply."""
        connection = HTTPConnection(self.host, timeout=60)
        kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", f"/api/v1/{path}", data, {"x-api-key": self.token, "content-type": kind})
        reply = connection.getresponse()
        found = reply.read()
        return reply.status, json.loads(found) if reply.headers["content-type"] == "application/json" else found

    def result(self, path: str, body: Any) -> Any:
        """Send a request and wait for its result."""
        status, answer = self.send(path, body)
        assert status == 200, answer
        return self.fetch(answer["request_id"])

    def fetch(self, request: str) -> Any:
        """Wait for a result."""
        status, found = self.send("retrieve_future", {"request_id": request})
        assert status == 200, found
        return found

    def create(self, rank: int = 4, **more: Any) -> Any:
        """Create a model."""
        body = {
            "session_id": self.session,
            "model_seq_id": self.models,
            "base_model": base(),
            "lora_config": {"rank": rank, **more},
        }
        self.models += 1
        return self.result("create_model", body)

    def step(self, model: str, number: int, lr: float = 1e-2, **params: float) -> Any:
        """Step a model's optimizer."""
        body = {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": lr, **params}}
        return self.result("optim_step", body)

    def save(self, model: str, number: int, name: str, overwrite: bool = False) -> Any:
        """Save a model's state."""
        return self.result("save_weights", {"model_id": model, "seq_id": number, "path": name, "overwrite": overwrite})


def base() -> str:
    """Return the checkpoint of a tiny model."""
    return str(toy_files("qwen3") / "model")


#: Two datums of ``cross_entropy``.
DATA: list[Any] = [
    ([5, 6, 7, 8], {"target_tokens": [6, 7, 8, 9], "weights": [0, 1, 1, 0.5]}),
    ([5, 6, 11], {"target_tokens": [6, 11, 12], "weights": [0, 0, 1]}),
]
