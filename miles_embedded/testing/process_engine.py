"""An engine in a spawned process that communicates only by bytes.

It behaves like a production engine with an HTTP or RPC interface: weights are sent as serialised tensors, requests and responses as JSON,
and no memory is shared. ``engine_worker`` is the other side.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load as load_arrays
from safetensors.torch import save as save_tensors

from miles_core import errors
from miles_core.contracts.engine import Engine, EnginePart, PauseMode, Request, Response
from miles_core.data.media import Media
from miles_core.data.weight_unit import Encoded
from miles_embedded.manifest import plugin as EMBEDDED
from miles_embedded.testing import frames


class ProcessEngine(Engine):
    """The embedded engine in another process.

    Args:
        checkpoint: a checkpoint directory with a tokenizer.
        device: device of the model.
        limits: ``seed``, ``max_context`` and ``max_running_requests`` of ``miles_embedded.engine.settings.Settings``.
    """

    capabilities = frozenset(c.name for c in EMBEDDED.list_capabilities("engine")) - {
        "draft",
        "rebuild",
        "shared_storage",
        "weight_checksums",
    }

    def __init__(self, checkpoint: str | Path, device: str = "cpu", **limits: int) -> None:
        self._config = {"checkpoint": str(checkpoint), "device": device, **limits}
        self._version = -1
        self._facts: dict[str, Any] = {}
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        module = "miles_embedded.testing.engine_worker"
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, json.dumps(self._config), stdin=pipe, stdout=pipe, limit=1 << 24
        )
        self._reader = asyncio.get_running_loop().create_task(self._read())
        self._facts, _ = await self._call("start")

    async def stop(self) -> None:
        if self._process is None:
            return
        await self._call("stop")
        assert self._process.stdin is not None and self._reader is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reader
        self._process = None

    def model_facts(self) -> Mapping[str, Any]:
        return self._facts

    async def generate(self, request: Request) -> Response:
        data, payload = await self._call("generate", frames.pack_request(request))
        return frames.unpack_response(data, payload)

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        media: Sequence[tuple[Media, ...]] = (),
    ) -> list[np.ndarray]:
        if any(media):
            raise errors.MilesError("this engine reads text only")
        arguments = {"sequences": [list(s) for s in sequences], "temperature": temperature}
        _, payload = await self._call("score", arguments)
        arrays = load_arrays(payload)
        return [arrays[str(i)] for i in range(len(sequences))]

    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        for unit in units:
            parts = {name: tensor.contiguous().cpu() for name, tensor in unit.parts.items()}
            await self._call("unit", {"name": unit.name, "format": unit.format}, save_tensors(parts))
        await self._call("update_weights", {"version": version})
        self._version = version

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        memory = dict(message.get("memory", {}))
        data = memory.pop("data", b"")
        arguments = {"message": {**message, "memory": memory}, "version": version, "last": last}
        await self._call("receive", arguments, bytes(data))
        if last:
            self._version = version

    async def pause(self, mode: PauseMode = "abort") -> None:
        await self._call("pause", {"mode": mode})

    async def abort(self, keys: Collection[int] | None = None) -> None:
        await self._call("abort", {"keys": None if keys is None else list(keys)})

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        await self._call("sleep", {"parts": list(parts)})

    async def wake(self, parts: Sequence[EnginePart] = ("weights", "cache")) -> None:
        await self._call("wake", {"parts": list(parts)})

    async def _call(
        self, method: str, arguments: dict[str, Any] | None = None, payload: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("the engine process is not running; call start first")
        if self._reader is not None and self._reader.done():
            raise RuntimeError("the engine process has ended")
        number = next(self._ids)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(frames.pack({"id": number, "method": method, "arguments": arguments or {}}, payload))
        return await future

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        try:
            while (frame := await frames.read(self._process.stdout)) is not None:
                self._resolve(*frame)
        finally:
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(RuntimeError("the engine process ended before it returned a result"))
            self._pending.clear()

    def _resolve(self, message: dict[str, Any], payload: bytes) -> None:
        future = self._pending.pop(message["id"])
        if future.done():
            return
        if "error" in message:
            kind, text = message["error"]
            known = getattr(errors, kind, None)
            future.set_exception(known(text) if known else RuntimeError(f"{kind} in the engine process: {text}"))
        else:
            future.set_result((message["result"], payload))
