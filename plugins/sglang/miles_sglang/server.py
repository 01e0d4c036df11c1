"""Connects to a running SGLang server over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

from miles_core.chat import call_in_thread
from miles_core.plugin import redact
from miles_sglang import tensor_messages
from miles_sglang.answers import Answer
from miles_sglang.link import Link, SglangError
from miles_tools.http_client import MAX_BYTES, HttpError, exchange

log = logging.getLogger(__name__)

_POLL_S = 1.0
#: The first HTTP status of a server that is still loading its model, or whose scheduler has ended.
_FAILED = 500
#: Timeout of a call in seconds. Long, because responses may queue behind others; TCP keep-alive detects a lost host earlier.
ANSWER_SECONDS = 3600.0
#: Timeout in seconds of a call to a server that may still be starting.
FIRST_ANSWER_SECONDS = 30.0
_LEAST_ANSWER_SECONDS = 5.0
#: Maximum bytes of an answer of ``generate``; recorded experts and sampling supports are large.
MAX_ANSWER = 4 << 30
#: Options of which a server may have more than the run needs, and all that the run's adapters need.
_LEAST = frozenset({"max_lora_rank", "max_loaded_loras", "max_loras_per_batch"})
_OF_ADAPTERS = _LEAST | {"enable_lora", "lora_target_modules"}
#: Maximum open requests; each blocks one thread.
_THREADS = 512


class NotReachable(SglangError):
    """No server answers at the address, or it is still starting.

    Attributes:
        cause: the reason without advice.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class ServerLink(Link):
    """Connection to a server at an address.

    Args:
        url: e.g. ``http://host:30000``.
        startup_timeout: seconds to wait for the first answer.
        arguments: the user's ServerArgs; the server must have been started with the same values.
    """

    def __init__(
        self, url: str, startup_timeout: float = 900.0, arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.url, self.startup_timeout, self.arguments = url.rstrip("/"), startup_timeout, arguments
        self.ranks = 1
        self._slots: asyncio.Semaphore | None = None

    async def start(self) -> Mapping[str, Any]:
        self._slots = asyncio.Semaphore(_THREADS)
        try:
            info = await self._first_answer()
            if not isinstance(info, Mapping) or "tp_size" not in info:
                raise SglangError(
                    f"--sglang-url {self.url}: the server at this address is no SGLang server; correct the address"
                )
            self._check(info)
            self.ranks = int(info["tp_size"])
            return {**info, **await self.describe()}
        except BaseException:
            await self.stop()
            raise

    async def describe(self, timeout: float = FIRST_ANSWER_SECONDS) -> Mapping[str, Any]:
        """Return the server's ``model_info``: ``architectures``, ``weight_version``, ... Its scheduler is not involved."""
        found = await self._ask("model_info", None, timeout)
        if not isinstance(found, Mapping):
            raise SglangError(f"--sglang-url {self.url}: the answer of model_info is not in SGLang's format")
        return found

    async def _first_answer(self) -> Any:
        """Return the server's ``server_info``, waiting until it is up."""
        end, told = time.monotonic() + self.startup_timeout, False
        while True:
            try:
                left = max(end - time.monotonic(), _LEAST_ANSWER_SECONDS)
                return await self._ask("server_info", None, min(left, FIRST_ANSWER_SECONDS))
            except NotReachable as error:
                if time.monotonic() + _POLL_S > end:
                    raise
                if not told:
                    log.info("%s; waiting for it (--sglang-startup-timeout %g)", error, self.startup_timeout)
                    told = True
                await asyncio.sleep(_POLL_S)
            except SglangError as error:
                raise SglangError(
                    f"{error}; this is no SGLang server that this plugin supports: correct the address"
                ) from error

    def _check(self, info: Mapping[str, Any]) -> None:
        """Raise SglangError if the server runs with other options than this run, or with a draft model."""
        draft = info.get("speculative_draft_model_path")
        if draft not in (None, info.get("model_path")):
            raise SglangError(
                f"--sglang-url {self.url}: the server drafts with {draft}, and would load every weight update into the draft model, too; "
                "start it without the draft"
            )
        other = [
            name for name, value in self.arguments.items() if name in info and not _suffices(name, info[name], value)
        ]
        if other and other[0] in _OF_ADAPTERS:
            name, value = other[0], self.arguments[other[0]]
            needed = " ".join(value) if isinstance(value, list) else "" if value is True else str(value)
            raise SglangError(
                f"--sglang-url {self.url}: the server runs with {name} = {info[name]}, which is too little for the adapters of this run; "
                f"start it with --{name.replace('_', '-')} {needed}".rstrip()
            )
        if other:
            flag = f"--sglang-{other[0].replace('_', '-')}"
            raise SglangError(
                f"--sglang-url {self.url}: the server runs with {other[0]} = {info[other[0]]}, and {flag} of this run is "
                f"{self.arguments[other[0]]}; start the server with the same value, or remove the option from this run"
            )

    async def stop(self) -> None:
        self._slots = None

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        return _parse_answer(await self._ask("generate", body), self.url)

    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        if endpoint in tensor_messages.ENDPOINTS:
            message = await asyncio.to_thread(tensor_messages.encode, endpoint, body, payload, self.ranks)
            return await self.send(endpoint, message)
        answer = await self._ask(endpoint, {} if endpoint == "flush_cache" else body)
        return {"success": True} if endpoint == "flush_cache" else answer

    async def send(self, endpoint: str, message: bytes) -> Any:
        """Call an endpoint with a body that is already encoded as JSON."""
        return await self._exchange_in_thread(endpoint, message, ANSWER_SECONDS)

    async def _ask(self, endpoint: str, body: Mapping[str, Any] | None, timeout: float = ANSWER_SECONDS) -> Any:
        return await self._exchange_in_thread(endpoint, None if body is None else json.dumps(body).encode(), timeout)

    async def _exchange_in_thread(self, endpoint: str, data: bytes | None, timeout: float) -> Any:
        if self._slots is None:
            raise SglangError("the engine was not started, or was stopped")
        # other calls must not wait for open requests: an abort ends them
        async with self._slots if endpoint == "generate" else nullcontext():
            # not in an executor, whose threads would delay the end of the run while a server hangs
            return await call_in_thread(partial(self._exchange, endpoint, data, timeout), "sglang-server")

    def _exchange(self, endpoint: str, data: bytes | None, timeout: float) -> Any:
        headers, limit = {"Content-Type": "application/json"}, MAX_ANSWER if endpoint == "generate" else MAX_BYTES
        try:
            answer = exchange(f"{self.url}/{endpoint}", data, headers, timeout, limit)
        except HttpError as error:
            message = (
                f"--sglang-url {self.url}: no SGLang server answers there ({error}); start it, or correct the address"
            )
            raise NotReachable(str(error), message) from error
        if 300 <= answer.status < 400:
            raise SglangError(
                f"--sglang-url {self.url}: {endpoint} answered {answer.status}: redirected to {redact(answer.location)}; give the final "
                "address"
            )
        if answer.status >= 400:
            cause = f"{endpoint} answered {answer.status}: {answer.excerpt(500)}"
            message = f"--sglang-url {self.url}: {cause}"
            raise NotReachable(cause, message) if answer.status >= _FAILED else SglangError(message)
        try:
            return json.loads(answer.body)
        except (ValueError, RecursionError):
            return answer.body.decode(errors="replace")  # some endpoints answer with plain text


def _parse_answer(answer: Any, url: str) -> Answer:
    """Parse an answer of ``generate``. Raises SglangError if it is malformed."""
    try:
        found = Answer.from_sglang(answer)
        reason = found.meta["finish_reason"]
        if not (reason is None or isinstance(reason["type"], str)):
            raise TypeError("finish_reason")
        str(found.meta["weight_version"])
        return found
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        excerpt = redact(repr(answer))[:200]
        raise SglangError(
            f"--sglang-url {url}: the answer of generate is not in SGLang's format ({type(error).__name__}: {error}): {excerpt}; "
            "correct the address, or start a server of the supported version"
        ) from error


def _suffices(name: str, has: Any, needed: Any) -> bool:
    """Whether the value that a server reports for an option serves a run that needs another or the same one."""
    if name in _LEAST:
        return has is None or has >= needed
    if name == "lora_target_modules":
        return "all" in (has or ()) or {*needed} <= {*(has or ())}
    return bool(has == needed) or (needed == "NEXTN" and has == "EAGLE")  # SGLang's name of this alias
