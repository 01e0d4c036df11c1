"""A SGLang server that runs already, spoken to over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from miles_sglang.answers import Answer
from miles_sglang.link import Link, SglangError

_POLL_S = 1.0
#: Calls under way at once; each holds a thread, which does nothing but wait.
_THREADS = 512


class ServerLink(Link):
    """A server at an address.

    Args:
        url: e.g. ``http://host:30000``.
        startup_timeout: seconds to wait for its first answer.
    """

    def __init__(self, url: str, startup_timeout: float = 900.0) -> None:
        self.url, self.startup_timeout = url.rstrip("/"), startup_timeout
        self._threads: ThreadPoolExecutor | None = None

    async def start(self) -> Mapping[str, Any]:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sglang-server")
        started = time.monotonic()
        while True:
            try:
                info: Mapping[str, Any] = await self._ask("get_server_info", None)
                return info
            except SglangError:
                if time.monotonic() - started > self.startup_timeout:
                    await self.stop()
                    raise
                await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._threads = None

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        return Answer.of(await self._ask("generate", body))

    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        if payload:
            raise SglangError(f"{self.url} takes no tensors over HTTP; weights go to it by file")
        if endpoint == "flush_cache":
            await self._ask(endpoint, {})
            return {"success": True}
        return await self._ask(endpoint, body)

    async def _ask(self, endpoint: str, body: Mapping[str, Any] | None) -> Any:
        if self._threads is None:
            raise SglangError("the engine was not started, or was stopped")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._exchange, endpoint, body)

    def _exchange(self, endpoint: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/{endpoint}",
            data,
            {"Content-Type": "application/json"},
            method="GET" if data is None else "POST",
        )
        try:
            with urllib.request.urlopen(request) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise SglangError(f"{self.url}/{endpoint} answered {error.code}: {said}") from error
        except OSError as error:
            raise SglangError(
                f"--sglang-url {self.url}: no SGLang server answers there ({error}); start it, or correct the address"
            ) from error
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")  # some endpoints answer with a sentence
