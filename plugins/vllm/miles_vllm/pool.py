"""Running vLLM servers as one (``miles_workers.servers``)."""

from __future__ import annotations

import asyncio
import base64
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from miles_vllm.link import Link
from miles_vllm.requests import SCORING
from miles_vllm.server import FLAG, Needs, ServerLink, encode
from miles_workers.servers import PoolMetrics, PoolNews, SameModel, ServerList, ServerPool

#: Most bytes of weights in a message over HTTP, which contains them as text.
MESSAGE_BYTES = 128 << 20


class VllmMetrics(PoolMetrics):
    """Metrics of the servers of ``--vllm-url``."""

    engine = "vllm"


class PoolLink(Link):
    """A connection to the servers of a list.

    Args:
        url: addresses, or a file of them.
        startup_timeout: seconds to wait for each server of the first list.
        model: what the servers must serve.
        needs: what every server must have.
        weights_dir: directory for weights as files that the servers read; None sends them over HTTP.
    """

    news: PoolNews

    def __init__(
        self,
        url: Sequence[str],
        startup_timeout: float,
        model: SameModel,
        needs: Needs,
        weights_dir: Path | None,
    ) -> None:
        self._model, self._weights_dir = model, weights_dir
        connect = partial(ServerLink, needs=needs)
        self._pool = ServerPool(ServerList(FLAG, url), connect, startup_timeout, model, self._score_probe)
        self.news = self._pool.news
        self._prefix = secrets.token_hex(4)  # other runs may use the same server
        self._files = itertools.count()
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "generate": self._generate,
            "abort": self._abort,
            "pause": lambda: self._pool.pause(lambda link: link.pause()),
            "resume": lambda: self._pool.resume(lambda link: link.resume()),
            "receive": self._receive,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
        }

    async def start(self) -> int | None:
        return min(int(info["max_model_len"]) for info in await self._pool.start()) - 1

    async def stop(self) -> None:
        await self._pool.stop()

    async def restart(self) -> None:
        await self._pool.restart()

    async def call(self, method: str, *args: Any) -> Any:
        return await self._calls[method](*args)

    async def call_each(self, method: str, *args: Any) -> Mapping[str, Any]:
        assert method == "generate"
        number, tokens, parameters, adapter = args
        ask = self._asker(self._id(number), tokens, parameters, adapter)
        return await self._pool.generate_each(adapter, ask)

    def _id(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    async def _generate(self, number: int, tokens: NDArray[Any], parameters: Mapping[str, Any], adapter: str) -> Any:
        rid = self._id(number)
        return await self._pool.generate(rid, adapter, self._asker(rid, tokens, parameters, adapter))

    @staticmethod
    def _asker(*args: Any) -> Callable[[ServerLink], Awaitable[Any]]:
        return lambda link: link.generate(*args)

    async def _abort(self, number: int) -> None:
        await self._pool.abort(self._id(number))

    async def _receive(self, message: Mapping[str, Any], version: int, last: bool) -> dict[str, Any]:
        """Send a bucket to all servers that receive the update; see ``Host.receive``."""
        if message["number"] == 0:
            self._pool.begin_update()
        answers: list[dict[str, Any]] = []

        async def send(link: ServerLink) -> None:
            answers.append(await link.receive(body))

        file = None if self._weights_dir is None else self._weights_dir / f"{self._prefix}-{next(self._files)}.weights"
        try:
            body = await asyncio.to_thread(_pack, message, version, last, file)
            await self._pool.update(send, str(version) if last else None)
        finally:
            if file is not None:
                file.unlink(missing_ok=True)
        return {**answers[0], "missed": next((each["missed"] for each in answers if each["missed"]), [])}

    async def _load_adapter(self, name: str, config: Mapping[str, Any], tensors: bytes) -> None:
        text = await asyncio.to_thread(lambda: base64.b64encode(tensors).decode())
        await self._pool.load_adapter(name, lambda link: link.load_adapter(name, config, text))

    async def _unload_adapter(self, name: str) -> None:
        await self._pool.unload_adapter(name, lambda link: link.unload_adapter(name))

    async def _score_probe(self, link: ServerLink) -> NDArray[Any]:
        answer = await link.generate(secrets.token_hex(8), self._model.probe(), SCORING)
        found: NDArray[Any] = answer["prompt_log_probs"]
        return found


def _pack(message: Mapping[str, Any], version: int, last: bool, file: Path | None) -> bytes:
    """Return the body of a call with the bytes of a bucket, or with the name of the file to which they are written."""
    data = message["memory"]["data"][: message["nbytes"]]
    if file is None:
        return encode({**message, "memory": {"kind": "data", "data": data}}, version, last)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return encode({**message, "memory": {"kind": "read", "path": str(file.absolute())}}, version, last)
