"""The server of ``miles watch``: the page, its data, and nothing else, for programs on this machine that know the token.

Three things keep others out. It listens on the loopback address only. Every address begins with a random token, which is compared in
constant time. And the ``Host`` header must name this machine, so that a web page cannot reach it under a name of its own (DNS rebinding).
It answers names of a fixed table; no part of an address becomes a path on the disk.
"""

from __future__ import annotations

import errno
import gzip
import hmac
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from miles_core.errors import MilesError
from miles_tools.report.page import FILES, read_page_file, to_json
from miles_tools.watch.runs import WatchedRuns

ADDRESS, PORT = "127.0.0.1", 8790
#: Names of this machine in a ``Host`` header, with any port: an ssh tunnel may use another one.
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_JSON = "application/json; charset=utf-8"
#: Answers of at least this many bytes are compressed.
_COMPRESSED = 2000
log = logging.getLogger(__name__)


class WatchServer(ThreadingHTTPServer):
    """Serves the page of runs at ``url``.

    Args:
        directories: the run directories.
        port: port on the loopback address; 0 chooses a free one.

    Raises:
        MilesError: the port is in use, or as for ``WatchedRuns``.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, directories: Sequence[Path], port: int = PORT) -> None:
        self.runs = WatchedRuns(directories)
        self.token = secrets.token_urlsafe(18)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise MilesError(
                    f"port {port} is in use (another miles watch?); choose another one: --port {port + 1}, or --port 0 for a free one"
                ) from error
            raise MilesError(
                f"cannot listen on port {port} ({getattr(error, 'strerror', None) or error}); choose another one with --port"
            ) from error

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"


@lru_cache
def _page_file(name: str) -> bytes:
    return read_page_file(name).encode()


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version = "miles", ""
    protocol_version = "HTTP/1.1"
    #: Seconds after which a silent connection is closed.
    timeout = 60

    def do_GET(self) -> None:
        """Answer a request; see the module's description."""
        host = self.headers.get("Host", "")
        if host.rsplit(":", 1)[0] not in _HOSTS and host not in _HOSTS:
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers only as localhost or 127.0.0.1")
            return
        try:
            address = urlsplit(self.path)
            query = dict(parse_qsl(address.query, max_num_fields=20))
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "not an address")
            return
        _, token, *names = address.path.split("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(
                HTTPStatus.FORBIDDEN,
                "the token in the address is missing or wrong: open the address that miles watch printed",
            )
        elif not names:  # relative addresses need the slash; the target is relative, too, for a tunnel
            self._send(b"", "text/plain", HTTPStatus.MOVED_PERMANENTLY, {"Location": f"{self.server.token}/"})
        elif len(names) == 1:
            self._answer(names[0], query)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    do_HEAD = do_GET

    def _answer(self, name: str, query: Mapping[str, str]) -> None:
        if name in FILES:
            self._send(_page_file(name), FILES[name])
            return
        runs = self.server.runs
        answers: dict[str, Callable[[], Any]] = {
            "overview": lambda: runs.overview(query.get("have", "")),
            "samples": lambda: runs.samples(query),
            "sample": lambda: runs.sample(query),
        }
        try:
            if name == "image":
                self._send(*runs.image(query))
            elif name in answers:
                found = answers[name]()
                if found is None:
                    self._send(b"", _JSON, HTTPStatus.NO_CONTENT)
                else:
                    self._send(to_json(found).encode(), _JSON)
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        except MilesError as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error))
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("the answer to %s failed", name)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    def _refuse(self, status: HTTPStatus, problem: str) -> None:
        self._send(to_json({"problem": problem}).encode(), _JSON, status)

    def _send(
        self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, more: Mapping[str, str] | None = None
    ) -> None:
        headers = {**_HEADERS, "Content-Type": kind, **(more or {})}
        if (
            len(content) >= _COMPRESSED
            and not kind.startswith("image/")
            and "gzip" in self.headers.get("Accept-Encoding", "")
        ):
            content = gzip.compress(content, 1)
            headers["Content-Encoding"] = "gzip"
        if status != HTTPStatus.NO_CONTENT:
            headers["Content-Length"] = str(len(content))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle(self) -> None:
        """Handle a connection; one that the browser closed is not an error."""
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            log.debug("a connection was closed")

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests without their addresses, which contain the token."""
        log.debug("answered %s", args[1] if len(args) > 1 else format)
