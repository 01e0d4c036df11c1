"""HTTP server on an event loop, for commands and plugins that offer an interface. Requires uvicorn, which they depend on.

A subclass implements ``serve``, an ASGI application; the functions of this module read and check a request and send the reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from miles_core.errors import ConfigError

__all__ = ["ApiError", "HttpServer", "Receive", "Send", "check_lengths", "read_header", "send_bytes", "send_json"]

#: Receives the next part of an ASGI request.
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
#: Sends a part of an ASGI reply.
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Seconds in which the body of a request must arrive, and seconds for which an idle connection is kept.
BODY_SECONDS, IDLE_SECONDS = 60.0, 75


class ApiError(Exception):
    """An error that a client receives.

    Attributes:
        status: HTTP status.
        message: one sentence for the client's developer.
        code: machine-readable reason.
        retry: whether the same request may succeed later.
    """

    def __init__(self, status: int, message: str, code: str, retry: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry = status, message, code, retry


class HttpServer:
    """Listens, and passes requests to ``serve``.

    Args:
        host, port: where to listen; port 0 takes a free one.
        max_body: maximum bytes of a request.
        flags: the flags are ``{flags}host``, ``{flags}port`` and ``{flags}max-body``, for error messages.

    Attributes:
        name: what messages call it.
        address: ``http://HOST:PORT`` while listening.
    """

    name = "server"

    def __init__(self, host: str, port: int, max_body: int, flags: str) -> None:
        self.host, self.port, self.max_body, self.flags = host, port, max_body, flags
        self.address = ""
        self._task: asyncio.Task[None] | None = None
        self._server: Any = None

    async def serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        raise NotImplementedError

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be used.
        """
        import uvicorn

        class Quiet(uvicorn.Server):  # type: ignore[misc, unused-ignore]
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:  # signals belong to the program
                yield

        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # without the protocol asyncio does not disable Nagle's algorithm, which delays each reply by 40 ms
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"the {self.name} cannot listen on {self.host}:{self.port} ({error.strerror}); give another {self.flags}host or {self.flags}port"
            ) from error
        config = uvicorn.Config(
            self.serve,
            lifespan="off",
            ws="none",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=4096,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self._server = Quiet(config)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            await self._task
        host, port = listener.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def stop(self) -> None:
        """Close all connections."""
        if self._task is not None and self._server is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = self._server = None

    async def read_body(self, scope: Mapping[str, Any], receive: Receive) -> bytes:
        """Receive the body of a request within limits of time and size."""
        length = read_header(scope, b"content-length")
        parts: list[bytes] = []
        size = int(length) if length.isdecimal() else 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = size <= self.max_body
                size = 0 if more else size
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ApiError(400, "the client closed the connection", "closed")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = bool(message.get("more_body")) and size <= self.max_body
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds", "timeout") from None
        if size > self.max_body:
            raise ApiError(
                413,
                f"the request has {size} bytes or more; {self.flags}max-body is {self.max_body}",
                "request_too_large",
            )
        return b"".join(parts)


def check_lengths(scope: Mapping[str, Any]) -> None:
    """Refuse a request with two headers that say where its body ends: a proxy may believe the other one (RFC 9112, 6.3)."""
    names = [key for key, _ in scope["headers"] if key in (b"content-length", b"transfer-encoding")]
    if len(names) > 1:
        raise ApiError(
            400,
            f"the request has two length headers ({', '.join(map(bytes.decode, names))}); send one",
            "invalid_request",
        )


def read_header(scope: Mapping[str, Any], name: bytes) -> str:
    """Return the value of a header; "" if the request has none of this name."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def send_json(send: Send, status: int, body: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send a complete reply with a JSON body."""
    data = json.dumps(body, ensure_ascii=False).encode()
    await send_bytes(send, status, data, b"application/json", headers)


async def send_bytes(
    send: Send, status: int, data: bytes, kind: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Send a complete reply with a body of the content type ``kind``."""
    own = [(b"content-type", kind), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": data})
