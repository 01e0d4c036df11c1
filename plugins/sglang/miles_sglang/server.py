"""A SGLang server that runs already, spoken to over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from miles_sglang.answers import Answer
from miles_sglang.link import Link, SglangError

log = logging.getLogger(__name__)

_POLL_S = 1.0
#: The status of a server that is loading its model.
_NOT_YET = 503
#: Calls under way at once; each holds a thread, which does nothing but wait.
_THREADS = 512


class NotThere(SglangError):
    """Nobody answers at the address, or not yet."""


class ServerLink(Link):
    """A server at an address.

    Args:
        url: e.g. ``http://host:30000``.
        startup_timeout: seconds to wait for its first answer.
        arguments: of ``ServerArgs``, as a user gave them: how the server must have been started.
    """

    def __init__(
        self, url: str, startup_timeout: float = 900.0, arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.url, self.startup_timeout, self.arguments = url.rstrip("/"), startup_timeout, arguments
        self._threads: ThreadPoolExecutor | None = None

    async def start(self) -> Mapping[str, Any]:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sglang-server")
        try:
            info = await self._first_answer()
            if not isinstance(info, Mapping) or "tp_size" not in info:
                raise SglangError(
                    f"--sglang-url {self.url}: what answers there is no SGLang server; correct the address"
                )
            self._check(info)
        except BaseException:
            await self.stop()
            raise
        return info

    async def _first_answer(self) -> Any:
        """What the server says of itself, once it is up."""
        started, told = time.monotonic(), False
        while True:
            try:
                return await self._ask("server_info", None)
            except NotThere as error:
                if time.monotonic() - started > self.startup_timeout:
                    raise
                if not told:
                    log.info("%s; waiting for it (--sglang-startup-timeout %g)", error, self.startup_timeout)
                    told = True
                await asyncio.sleep(min(_POLL_S, self.startup_timeout))
            except SglangError as error:
                raise SglangError(
                    f"{error}; that is no SGLang server as this plugin knows it: correct the address"
                ) from error

    def _check(self, info: Mapping[str, Any]) -> None:
        """Refuse a server that runs with other options than this run was given."""
        other = [name for name, value in self.arguments.items() if name in info and info[name] not in _spellings(value)]
        if other:
            flag = f"--sglang-{other[0].replace('_', '-')}"
            raise SglangError(
                f"--sglang-url {self.url}: the server runs with {other[0]} = {info[other[0]]}, and {flag} of this run is "
                f"{self.arguments[other[0]]}; start the server with it, or leave what asks for it out of this run"
            )

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
            said = " ".join(error.read().decode(errors="replace").split())[:500]
            kind = NotThere if error.code == _NOT_YET else SglangError
            raise kind(f"--sglang-url {self.url}: {endpoint} answered {error.code}: {said}") from error
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", error)
            raise NotThere(
                f"--sglang-url {self.url}: no SGLang server answers there ({why}); start it, or correct the address"
            ) from error
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")  # some endpoints answer with a sentence


def _spellings(value: Any) -> tuple[Any, ...]:
    """What a server may say of an option that it was started with: NEXTN is SGLang's second name of EAGLE."""
    return (value, "EAGLE") if value == "NEXTN" else (value,)
