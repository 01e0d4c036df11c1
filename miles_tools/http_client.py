"""HTTP client with deadlines, bounded response sizes and no redirects, for all requests to services.

A socket's time-out restarts with every byte received, so a service that sends a byte now and then could block forever. Here one
deadline covers the whole exchange, and each read may take the remaining time.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from miles_core.errors import ConfigError, MilesError
from miles_core.redact import redact

__all__ = ["MAX_BYTES", "HttpError", "check_header", "exchange"]

#: Maximum time to connect to one address, in seconds.
CONNECT_SECONDS = 10.0
#: Default maximum size of a response, in bytes.
MAX_BYTES = 64 << 20
#: HTTP statuses after which repeating the request may succeed.
RETRIABLE = frozenset({408, 425, 429, 500, 502, 503, 504})


class HttpError(MilesError):
    """No complete response: no connection, a truncated response, an expired deadline, or too many bytes.

    Attributes:
        retriable: whether repeating the request may help.
    """

    def __init__(self, text: str, retriable: bool = True) -> None:
        super().__init__(redact(text))
        self.retriable = retriable


@dataclass(frozen=True)
class Answer:
    """The response of a service.

    Attributes:
        status: the HTTP status code.
        reason: the reason phrase.
        body: the whole body.
        location: the ``Location`` header of a redirect; empty without one.
    """

    status: int
    reason: str
    body: bytes
    location: str = ""

    def excerpt(self, characters: int = 200) -> str:
        """Return the beginning of the body as one line of text, without credentials."""
        text = " ".join(self.body[: 4 * characters].decode(errors="replace").split())
        return redact(text)[:characters]


def check_url(url: str, flag: str) -> None:
    """Raise ConfigError unless ``url``, the value of ``flag``, is an http or https address with a host."""
    shown = redact(url)
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(
            f"{flag} {shown}: {redact(str(error))}; give an address such as http://host:8000/path"
        ) from error
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"{flag} {shown}: the address must start with http:// or https://")
    if not parts.hostname or port == 0 or re.search(r"[\x00-\x20\x7f]", url) or not url.isascii():
        raise ConfigError(f"{flag} {shown}: give an address with a host, without spaces, such as http://host:8000/path")


def check_header(value: str, origin: str) -> str:
    """Return ``value``, stripped of surrounding whitespace, if it is a valid header value; else raise a ConfigError that does not show it."""
    value = value.strip()
    if not value.isascii() or not value.isprintable():
        raise ConfigError(
            f"{origin}: the value has characters that no HTTP header can hold (a line break?); set it again"
        )
    return value


def exchange(
    url: str,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    max_bytes: int = MAX_BYTES,
) -> Answer:
    """Send one request and return the whole response, whatever its status. Redirects are returned, not followed.

    Args:
        data: the body of a POST request; None sends a GET request.
        timeout: seconds for the whole exchange, from the connection to the last byte.
        max_bytes: maximum size of the response body.

    Raises:
        HttpError: no complete response arrived, or the request is malformed.
    """
    try:
        request = urllib.request.Request(url, data, dict(headers or {}), method="GET" if data is None else "POST")
        try:
            with _OPENER.open(request, timeout=timeout) as reply:
                return _read(reply, url, max_bytes)
        except urllib.error.HTTPError as refused:
            with refused:
                return _read(refused, url, max_bytes)
    except TimeoutError as error:
        raise HttpError(f"{url} did not answer completely within {timeout:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise HttpError(f"{url} did not answer within {timeout:g} s") from error
        raise HttpError(f"{url}: {_explain_error(reason)}") from error
    except ValueError:  # a bad header or address; not chained, because the library's message repeats the value
        raise HttpError(
            f"{url}: the request cannot be sent: its address or a header is malformed", retriable=False
        ) from None


def _read(reply: Any, url: str, max_bytes: int) -> Answer:
    body = reply.read(max_bytes + 1)
    if len(body) > max_bytes:
        raise HttpError(f"{url} answered with more than {max_bytes:,} bytes", retriable=False)
    expected = reply.headers.get("Content-Length")
    if expected is not None and expected.isdigit() and len(body) < int(expected):  # ``read(n)`` does not raise this
        raise http.client.IncompleteRead(body, int(expected) - len(body))
    return Answer(reply.status, str(reply.reason), body, reply.headers.get("Location") or "")


def _explain_error(error: object) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return f"the answer ended after {len(error.partial)} bytes"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the connection was closed without an answer"
    if isinstance(error, http.client.BadStatusLine):
        return f"the answer is not HTTP: {str(error)[:80]!r}"
    return " ".join(str(error).split())[:300] or type(error).__name__


class _Deadline(io.RawIOBase):
    """Reads from a socket until a deadline; raises TimeoutError after it."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, deadline: float) -> None:
        self._raw, self._socket, self._deadline = raw, connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._socket.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, connection: socket.socket, *args: Any, deadline: float, **named: Any) -> None:
        super().__init__(connection, *args, **named)
        self.fp = io.BufferedReader(_Deadline(self.fp.detach(), connection, deadline))


class _DeadlineConnection(http.client.HTTPConnection):
    """A connection with one deadline, ``timeout`` seconds after its creation."""

    def __init__(self, host: str, *args: Any, timeout: float, **named: Any) -> None:
        super().__init__(host, *args, timeout=timeout, **named)  # type: ignore[misc]
        self._deadline = time.monotonic() + timeout
        self.response_class = partial(_Response, deadline=self._deadline)  # type: ignore[assignment]

    def connect(self) -> None:
        self.timeout = min(CONNECT_SECONDS, max(self._deadline - time.monotonic(), 0.001))
        super().connect()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock.settimeout(max(self._deadline - time.monotonic(), 0.001))


class _HttpsDeadlineConnection(_DeadlineConnection, http.client.HTTPSConnection):
    pass


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_DeadlineConnection, req)  # type: ignore[arg-type]


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpsDeadlineConnection, req)  # type: ignore[arg-type]


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        """Return None, so that a 3xx response is raised as an HTTPError instead of followed."""


_OPENER = urllib.request.build_opener(_HttpHandler, _HttpsHandler, _NoRedirection)
