"""The HTTP server: finds the session of a request by its API key, reads the body within limits, and sends the reply."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from miles_chat import call_in_thread
from miles_core.data import describe_error, valid_data
from miles_core.plugin import ConfigError
from miles_endpoint import chat, completions, responses
from miles_endpoint.api_error import ApiError
from miles_endpoint.service import Models, Reply

if TYPE_CHECKING:
    from miles_endpoint.session import Exchange, Session

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Interfaces by path.
_INTERFACES: dict[str, Callable[[Mapping[str, Any], Session, Models], Reply]] = {
    "/v1/chat/completions": chat.prepare,
    "/v1/completions": completions.prepare,
    "/v1/responses": responses.prepare,
}
#: Seconds in which the body of a request must arrive, and seconds for which an idle connection is kept.
BODY_SECONDS, IDLE_SECONDS = 60.0, 75
#: Bytes from which a body is parsed in a thread.
LONG = 256 * 1024
#: Number of ended sessions that are remembered, to answer late requests.
REMEMBERED = 10_000
_PLAIN = [(b"content-type", b"application/json")]


class Server:
    """Serves the sessions of a run.

    Args:
        models: the models of the run.
        host, port: where to listen; port 0 takes a free one.
        max_body: maximum bytes of a request.

    Attributes:
        sessions: API key -> session.
        url: base URL for agents.
    """

    def __init__(self, models: Models, host: str, port: int, max_body: int, url: str | None = None) -> None:
        self.models, self.host, self.port, self.max_body = models, host, port, max_body
        self.sessions: dict[str, Session] = {}
        self.url, self._given_url = "", url
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self._server: Any = None

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be used.
        """
        import uvicorn

        class Quiet(uvicorn.Server):  # type: ignore[misc, unused-ignore]
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:  # signals belong to the run
                yield

        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"the endpoint cannot listen on {self.host}:{self.port} ({error.strerror}); give another --endpoint-host or --endpoint-port"
            ) from error
        config = uvicorn.Config(
            self._serve,
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
        self.url = self._given_url or f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def stop(self) -> None:
        """Close all connections."""
        if self._task is not None and self._server is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = self._server = None

    def open(self, session: Session) -> str:
        """Register a session; return its API key."""
        token = f"sk-{secrets.token_urlsafe(32)}"
        self.sessions[token] = session
        return token

    async def close(self, token: str) -> None:
        """End a session: later requests with its key are refused."""
        session = self.sessions.pop(token)
        self._ended[_digest(token)] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        await session.close()

    # ---- requests

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        session: Session | None = None
        raw: bytes | None = b"" if scope["method"] == "GET" else None
        try:
            _check_lengths(scope)
            session = self._session_of(scope)
            path, method = str(scope["path"]).rstrip("/"), scope["method"]
            if method == "GET" and path.startswith("/v1/models"):
                await _send_json(send, 200, self._models_body(path))
            elif path not in _INTERFACES:
                raise ApiError(
                    404, f"there is no {method} {path[:80]}; there are: POST {', POST '.join(_INTERFACES)}", "not_found"
                )
            elif method != "POST":
                raise ApiError(405, f"{path} takes POST, not {method}", "method_not_allowed")
            else:
                raw = await self._read_body(scope, receive)
                await self._answer(session, path, scope, raw, receive, send)
        except ApiError as error:
            if session is not None:
                session.refuse(error)
            headers = [] if error.retry else [(b"x-should-retry", b"false")]
            if raw is None:  # otherwise the rest of the body would be received, to be discarded
                headers.append((b"connection", b"close"))
            await _send_json(send, error.status, error.body(), headers)

    def _session_of(self, scope: Mapping[str, Any]) -> Session:
        kind, _, token = _header(scope, b"authorization").partition(" ")
        session = self.sessions.get(token.strip())
        if kind.lower() == "bearer" and session is not None:
            return session
        if _digest(token.strip()) in self._ended:
            raise ApiError(410, "the sample of this API key has ended", "session_ended")
        raise ApiError(
            401, "no sample has this API key; use OPENAI_API_KEY of the agent's environment", "invalid_api_key"
        )

    def _models_body(self, path: str) -> dict[str, Any]:
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "miles"} for name in self.models.policies]
        if path == "/v1/models":
            return {"object": "list", "data": cards}
        wanted = path.removeprefix("/v1/models/")
        self.models.policy_of({"model": wanted})
        return next(card for card in cards if card["id"] == wanted)

    async def _answer(
        self, session: Session, path: str, scope: Mapping[str, Any], raw: bytes, receive: Receive, send: Send
    ) -> None:
        body = _parse(raw) if len(raw) < LONG else await call_in_thread(lambda: _parse(raw), "parse")
        try:
            reply = _INTERFACES[path](body, session, self.models)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ApiError(400, f"the request is malformed ({describe_error(error)})", "invalid_request") from error
        idempotency = _header(scope, b"idempotency-key")
        retried = _header(scope, b"x-stainless-retry-count")
        digest = blake2b(path.encode() + idempotency.encode() + raw, digest_size=16).digest()
        exchange = await session.exchange(digest, bool(idempotency) or retried not in ("", "0"), reply.work)
        if not await _wait(exchange, receive):
            return
        try:
            made = reply.body(exchange.task.result())
        except asyncio.CancelledError:
            raise ApiError(410, "the sample of this API key has ended", "session_ended") from None
        except ApiError:
            raise
        except Exception as error:  # an engine failed: the run deals with it, and ends or repeats the sample
            raise ApiError(503, "the engine failed", "engine_failed") from error
        session.deliver(exchange)
        if body.get("stream"):
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            for chunk in reply.events(made):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            await _send_json(send, 200, made)

    async def _read_body(self, scope: Mapping[str, Any], receive: Receive) -> bytes:
        length = _header(scope, b"content-length")
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
                f"the request has {size} bytes or more; --endpoint-max-body is {self.max_body}",
                "request_too_large",
            )
        return b"".join(parts)


def _check_lengths(scope: Mapping[str, Any]) -> None:
    """Refuse a request with two headers that say where its body ends: a proxy may believe the other one (RFC 9112, 6.3)."""
    names = [key for key, _ in scope["headers"] if key in (b"content-length", b"transfer-encoding")]
    if len(names) > 1:
        raise ApiError(
            400,
            f"the request has two length headers ({', '.join(map(bytes.decode, names))}); send one",
            "invalid_request",
        )


def _header(scope: Mapping[str, Any], name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _digest(token: str) -> bytes:
    return blake2b(token.encode(), digest_size=16).digest()


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        body = valid_data(json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(body).__name__}", "invalid_json")
    return body


async def _wait(exchange: Exchange, receive: Receive) -> bool:
    """Wait for the answer; return False if the client disconnected before. The work goes on for a client that repeats the request."""
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((exchange.task, gone), return_when=asyncio.FIRST_COMPLETED)
        return exchange.task.done()
    finally:
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send: Send, status: int, body: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    data = json.dumps(body, ensure_ascii=False).encode()
    length = [(b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*_PLAIN, *length, *(headers or [])]})
    await send({"type": "http.response.body", "body": data})
