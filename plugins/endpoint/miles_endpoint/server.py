"""The HTTP server: finds the session of a request by its API key, reads the body within limits, and sends the reply."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from miles_core.chat import call_in_thread
from miles_core.data import describe_error, valid_data
from miles_endpoint import chat, completions, responses
from miles_endpoint.api_error import error_body
from miles_endpoint.service import Models, Reply
from miles_tools.http_server import ApiError, HttpServer, Receive, Send, check_lengths, read_header, send_json

if TYPE_CHECKING:
    from miles_endpoint.session import Exchange, Session

log = logging.getLogger(__name__)

#: Interfaces by path.
_INTERFACES: dict[str, Callable[[Mapping[str, Any], Session, Models], Reply]] = {
    "/v1/chat/completions": chat.prepare,
    "/v1/completions": completions.prepare,
    "/v1/responses": responses.prepare,
}
#: Bytes from which a body is parsed in a thread.
LONG = 256 * 1024
#: Number of ended sessions that are remembered, to answer late requests.
REMEMBERED = 10_000


class Server(HttpServer):
    """Serves the sessions of a run.

    Args:
        models: the models of the run.
        host, port: where to listen; port 0 takes a free one.
        max_body: maximum bytes of a request.

    Attributes:
        sessions: API key -> session.
        url: base URL for agents.
    """

    name = "endpoint"

    def __init__(self, models: Models, host: str, port: int, max_body: int, url: str | None = None) -> None:
        super().__init__(host, port, max_body, "--endpoint-")
        self.models = models
        self.sessions: dict[str, Session] = {}
        self.url, self._given_url = "", url
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    async def start(self) -> None:
        """See ``HttpServer.start``."""
        await super().start()
        self.url = self._given_url or f"{self.address}/v1"

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

    async def serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        session: Session | None = None
        raw: bytes | None = b"" if scope["method"] == "GET" else None
        try:
            check_lengths(scope)
            session = self._session_of(scope)
            path, method = str(scope["path"]).rstrip("/"), scope["method"]
            if method == "GET" and path.startswith("/v1/models"):
                await send_json(send, 200, self._models_body(path))
            elif path not in _INTERFACES:
                raise ApiError(
                    404, f"there is no {method} {path[:80]}; there are: POST {', POST '.join(_INTERFACES)}", "not_found"
                )
            elif method != "POST":
                raise ApiError(405, f"{path} takes POST, not {method}", "method_not_allowed")
            else:
                raw = await self.read_body(scope, receive)
                await self._answer(session, path, scope, raw, receive, send)
        except ApiError as error:
            if session is not None:
                session.refuse(error)
            headers = [] if error.retry else [(b"x-should-retry", b"false")]
            if raw is None:  # otherwise the rest of the body would be received, to be discarded
                headers.append((b"connection", b"close"))
            await send_json(send, error.status, error_body(error), headers)

    def _session_of(self, scope: Mapping[str, Any]) -> Session:
        kind, _, token = read_header(scope, b"authorization").partition(" ")
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
        idempotency = read_header(scope, b"idempotency-key")
        retried = read_header(scope, b"x-stainless-retry-count")
        digest = blake2b(path.encode() + idempotency.encode() + raw, digest_size=16).digest()
        exchange = await session.exchange(digest, bool(idempotency) or retried not in ("", "0"), reply.work)
        if not await _wait(exchange, receive):
            return
        made = _read_result(exchange, reply)
        session.deliver(exchange)
        if body.get("stream"):
            await _send_events(send, reply.events(made))
        else:
            await send_json(send, 200, made)


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


def _read_result(exchange: Exchange, reply: Reply) -> dict[str, Any]:
    """Return the body of the answer to an exchange whose task is done; ApiError if the task failed."""
    try:
        return reply.body(exchange.task.result())
    except asyncio.CancelledError:
        raise ApiError(410, "the sample of this API key has ended", "session_ended") from None
    except ApiError:
        raise
    except Exception as error:  # an engine failed: the run deals with it, and ends or repeats the sample
        raise ApiError(503, "the engine failed", "engine_failed") from error


async def _send_events(send: Send, events: Iterable[bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


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
