"""The HTTP side: checks the token, routes a request to the service, and sends its answer in the client's wire format."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Callable, MutableMapping
from hashlib import blake2b
from typing import Any

from miles_core.plugin import MilesError
from miles_service.service import Service
from miles_service.wire import decode_request
from miles_tools.http_server import (
    ApiError,
    HttpServer,
    Receive,
    Send,
    check_lengths,
    read_header,
    send_bytes,
    send_json,
)

PREFIX = "/api/v1/"
PROTOBUF = b"application/x-protobuf"
#: Flags that the client reads once: what this server does not need is off. Chunks arrive in order, and results are fetched one by one.
CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "use_pyqwest_transport": False,
    "sample_use_retrieve_futures": False,
    "sample_enable_stuck_detection": False,
}
#: Methods of the service that take a body and its digest.
_JOBS: dict[str, Callable[[Service, dict[str, Any], bytes], dict[str, Any]]] = {
    "create_model": Service.create_model,
    "load_weights": Service.load_weights,
    "optim_step": Service.optim_step,
    "forward_backward": Service.forward_backward,
    "save_weights": lambda service, body, digest: service.save_weights(body, digest, "weights"),
    "save_weights_for_sampler": lambda service, body, digest: service.save_weights(body, digest, "sampler_weights"),
    "unload_model": Service.unload,
    "asample": Service.sample,
}
#: Requests that are answered at once.
_ANSWERS: dict[str, Callable[[Service, dict[str, Any]], dict[str, Any]]] = {
    "healthz": lambda service, body: {"status": "ok"},
    "client/config": lambda service, body: CLIENT_CONFIG,
    "client/dynamic_config": lambda service, body: {},
    "telemetry": lambda service, body: {"status": "accepted"},
    "create_session": lambda service, body: service.create_session(),
    "get_info": lambda service, body: service.info(str(body["model_id"])),
    "weights_info": lambda service, body: service.weights_info(str(body["tinker_path"])),
    "create_sampling_session": Service.create_sampler,
}


class ServiceServer(HttpServer):
    """Serves clients.

    Args:
        host, port, max_body: see ``HttpServer``.
        token: what clients send as API key.
    """

    service: Service

    def __init__(self, host: str, port: int, max_body: int, token: str) -> None:
        super().__init__(host, port, max_body, "--")
        self.token = token

    async def stop(self) -> None:
        """Answer the requests that wait for results, and close all connections."""
        if self._server is not None:
            self.service.stopping.set()
        await super().stop()

    async def serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        raw: bytes | None = b"" if scope["method"] == "GET" else None
        try:
            check_lengths(scope)
            if not hmac.compare_digest(read_header(scope, b"x-api-key").encode(), self.token.encode()):
                raise ApiError(
                    401,
                    "this is not the token of this server; set TINKER_API_KEY to the token it printed",
                    "unauthorized",
                )
            if raw is None:
                raw = await self.read_body(scope, receive)
            found = await self._answer(str(scope["path"]), scope, raw)
            if isinstance(found, bytes):
                await send_bytes(send, 200, found, PROTOBUF)
            else:
                await send_json(send, 200, found)
        except ApiError as error:
            body: dict[str, Any] = {"error": error.message, "category": "user"}
            if error.status == 408:
                body |= {"type": "try_again", "queue_state": "active", "request_id": ""}
            await send_json(send, error.status, body, [(b"connection", b"close")] if raw is None else [])

    async def _answer(self, path: str, scope: MutableMapping[str, Any], raw: bytes) -> Any:
        name, service = path.removeprefix(PREFIX), self.service
        is_protobuf = read_header(scope, b"content-type").startswith(PROTOBUF.decode())
        try:
            body = decode_request(raw) if is_protobuf else _parse(raw)
            if name == "retrieve_future":
                return await service.result(str(body["request_id"]))
            if name in _JOBS:
                return _JOBS[name](service, body, blake2b(name.encode() + raw, digest_size=16).digest())
            if name in _ANSWERS:
                return _ANSWERS[name](service, body)
            return self._answer_other(name, body)
        except MilesError as error:
            raise ApiError(400, " ".join(str(error).split()), "invalid_request") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ApiError(400, f"the request {name} is malformed ({error!r:.120})", "invalid_request") from error

    def _answer_other(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        service = self.service
        if name == "session_heartbeat":
            service.session(str(body["session_id"]))
            return {"type": "session_heartbeat"}
        if name == "get_server_capabilities":
            model = {
                "model_name": service.base,
                "max_context_length": service.context,
                "trainable": True,
                "sampleable": True,
            }
            return {"supported_models": [model]}
        if match := re.fullmatch(r"sessions/([^/]+)/finish", name):
            session = service.session(match[1])
            service.finish(session, session.id)
            return {}
        if match := re.fullmatch(r"samplers/([^/]+)", name):
            return service.sampler_info(match[1])
        raise ApiError(
            404, f"this server has no {name!r:.80}; the documentation of miles serve lists what it has", "not_found"
        )


def _parse(raw: bytes) -> dict[str, Any]:
    body = json.loads(raw or b"{}")
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body
