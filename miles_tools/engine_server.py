"""A server of an engine's program, called over HTTP with JSON (``miles_workers.servers``)."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from miles_core.redact import redact
from miles_core.rollout.user_code import call_in_thread
from miles_tools.http_client import MAX_BYTES, HttpError, exchange
from miles_workers.servers import NotReachable, Server, ServerError

__all__ = ["ANSWER_SECONDS", "FIRST_ANSWER_SECONDS", "EngineServer"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 1.0
#: The first HTTP status of a server that is still loading its model, or whose scheduler has ended.
_FAILED = 500
#: Timeout of a call in seconds. Long, because responses may queue behind others; TCP keep-alive detects a lost host earlier.
ANSWER_SECONDS = 3600.0
#: Timeout in seconds of a call to a server that may still be starting.
FIRST_ANSWER_SECONDS = 30.0
_LEAST_ANSWER_SECONDS = 5.0
#: Maximum bytes of a response to a request; recorded experts and sampling supports are large.
MAX_ANSWER = 4 << 30
#: Maximum open requests; each blocks one thread.
_THREADS = 512


class EngineServer(Server):
    """Connection to a server at an address.

    Args:
        url: e.g. ``http://host:30000``.
        startup_timeout: seconds to wait for the first answer.

    Attributes:
        program, flag: name of the program, and the option with the address.
    """

    program: str
    flag: str

    def __init__(self, url: str, startup_timeout: float = 900.0) -> None:
        self.url, self.startup_timeout = url.rstrip("/"), startup_timeout
        self._slots: asyncio.Semaphore | None = None

    def open(self) -> None:
        """Allow calls."""
        self._slots = asyncio.Semaphore(_THREADS)

    async def stop(self) -> None:
        self._slots = None

    def headers(self) -> dict[str, str]:
        """Return the headers of every call."""
        return {"Content-Type": "application/json"}

    async def wait_for(self, ask: Callable[[float], Awaitable[T]]) -> T:
        """Return the result of the first call, which is repeated until the server is up.

        Args:
            ask: makes the call with a timeout in seconds.
        """
        end, told = time.monotonic() + self.startup_timeout, False
        while True:
            try:
                left = max(end - time.monotonic(), _LEAST_ANSWER_SECONDS)
                return await ask(min(left, FIRST_ANSWER_SECONDS))
            except NotReachable as error:
                if time.monotonic() + _POLL_S > end:
                    raise
                if not told:
                    waits = f"{self.flag.removesuffix('-url')}-startup-timeout"
                    log.info("%s; waiting for it (%s %g)", error, waits, self.startup_timeout)
                    told = True
                await asyncio.sleep(_POLL_S)

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        timeout: float = ANSWER_SECONDS,
        is_request: bool = False,
    ) -> Any:
        """Call a route and return the JSON, or the text, of its answer.

        Args:
            path: the route without the first slash.
            body: the JSON object of a POST, also encoded; None sends a GET.
            is_request: it generates; the number of such calls at the same time is limited, and their answers are large.

        Raises:
            NotReachable: no answer, or one of a server that is starting or has failed.
            ServerError: the server rejected the call.
        """
        if self._slots is None:
            raise ServerError("the engine was not started, or was stopped")
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        # other calls must not wait for open requests: an abort ends them
        async with self._slots if is_request else nullcontext():
            # not in an executor, whose threads would delay the end of the run while a server hangs
            call = partial(self._exchange, path, data, timeout, MAX_ANSWER if is_request else MAX_BYTES)
            return await call_in_thread(call, f"{self.program.lower()}-server")

    def _exchange(self, path: str, data: bytes | None, timeout: float, limit: int) -> Any:
        try:
            answer = exchange(f"{self.url}/{path}", data, self.headers(), timeout, limit)
        except HttpError as error:
            if not error.retriable:
                raise ServerError(f"{self.flag} {self.url}: {path}: {error}") from error
            message = f"{self.flag} {self.url}: no {self.program} server answers there ({error}); start it, or correct the address"
            raise NotReachable(str(error), message) from error
        if 300 <= answer.status < 400:
            raise ServerError(
                f"{self.flag} {self.url}: {path} answered {answer.status}: redirected to {redact(answer.location)}; give the final address"
            )
        if answer.status >= 400:
            raise self.refusal(path, answer.status, answer.excerpt(500))
        try:
            return json.loads(answer.body)
        except (ValueError, RecursionError):
            return answer.body.decode(errors="replace")  # some routes answer with plain text

    def refusal(self, path: str, status: int, text: str) -> ServerError:
        """Return the error for an answer with an HTTP status of 400 or more, whose body begins with ``text``."""
        cause = f"{path} answered {status}: {text}"
        message = f"{self.flag} {self.url}: {cause}"
        return NotReachable(cause, message) if status >= _FAILED else ServerError(message)
