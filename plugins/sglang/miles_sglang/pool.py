"""Several running servers as one SGLang (``miles_workers.servers``)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray

from miles_sglang import tensor_messages
from miles_sglang.answers import Answer
from miles_sglang.choices import Choices
from miles_sglang.link import Link
from miles_sglang.responses import score_body
from miles_sglang.server import FLAG, ServerLink
from miles_workers.servers import PoolMetrics, PoolNews, SameModel, ServerList, ServerPool

#: Entries of ``server_info`` and ``model_info`` that must be the same on all servers.
SAME = (
    "version", "model_type", "architectures", "dtype", "quantization", "kv_cache_dtype", "skip_tokenizer_init", "sampling_backend",
)  # fmt: skip
_UPDATES = ("update_weights_from_tensor", "update_weights_from_disk")
_LOADS = ("load_lora_adapter", "load_lora_adapter_from_tensors")


class SglangMetrics(PoolMetrics):
    """Metrics of the servers of ``--sglang-url``."""

    engine = "sglang"


class PoolLink(Link):
    """A connection to the servers of a list.

    Args:
        servers, connect, startup_timeout, model: see ``ServerPool``.
    """

    news: PoolNews

    def __init__(
        self,
        servers: ServerList,
        connect: Callable[[str, float], ServerLink],
        startup_timeout: float,
        model: SameModel,
    ) -> None:
        self._model = model
        self._pool = ServerPool(servers, connect, startup_timeout, model, self._score)
        self.news = self._pool.news

    async def start(self) -> Mapping[str, Any]:
        return _largest(await self._pool.start())

    async def stop(self) -> None:
        await self._pool.stop()

    async def restart(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the description of the servers that are left or have joined. The engine then sends them the weights."""
        return _largest(await self._pool.restart())

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        return await self._pool.generate(
            body["rid"], body.get("lora_path", ""), lambda link: link.generate(body), _version_of
        )

    async def generate_each(self, body: Mapping[str, Any]) -> Mapping[str, Answer]:
        return await self._pool.generate_each(body.get("lora_path", ""), lambda link: link.generate(body))

    async def _score(self, link: ServerLink) -> NDArray[Any]:
        answer = await link.generate(score_body(self._model.probe(), secrets.token_hex(8)))
        return answer.columns["prompt_log_probs"]

    def begin_update(self) -> None:
        self._pool.begin_update()

    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        pool, ask = self._pool, _asker(endpoint, body, payload)
        answer: Any = None
        if endpoint == "abort_request":
            answer = await pool.abort(body["rid"])
        elif endpoint in _UPDATES:
            answer = await pool.update(ask, body["weight_version"])
        elif endpoint in _LOADS:
            answer = await pool.load_adapter(body["lora_name"], ask, lambda answer: bool(answer["success"]))
        elif endpoint == "unload_lora_adapter":
            await pool.unload_adapter(body["lora_name"], ask)
        elif endpoint == "pause_generation":
            answer = await pool.pause(ask)
        elif endpoint == "continue_generation":
            answer = await pool.resume(ask)
        else:
            answer = await pool.call(ask)
        return {"success": True} if answer is None else answer


def _asker(
    endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview
) -> Callable[[ServerLink], Awaitable[Any]]:
    """Return a function that calls an endpoint of a server. A message with tensors is encoded once for all servers with the same number of ranks."""
    messages: dict[int, asyncio.Task[bytes]] = {}

    async def send(link: ServerLink) -> Any:
        if link.ranks not in messages:
            encoding = asyncio.to_thread(tensor_messages.encode, endpoint, body, payload, link.ranks)
            messages[link.ranks] = asyncio.ensure_future(encoding)
        return await link.send(endpoint, await asyncio.shield(messages[link.ranks]))

    return send if endpoint in tensor_messages.ENDPOINTS else lambda link: link.call(endpoint, body)


def _version_of(answer: Answer) -> str:
    return str(answer.meta["weight_version"])


def _largest(found: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the ``server_info`` of the server with most ranks, which limits the size of messages."""
    return max(found, key=lambda info: int(info["tp_size"]))


def connect_pool(choices: Choices, model: SameModel) -> PoolLink:
    """Return the link to the servers of ``--sglang-url``."""
    connect = partial(ServerLink, arguments=choices.arguments)
    return PoolLink(ServerList(FLAG, choices.url), connect, choices.startup_timeout, model)
