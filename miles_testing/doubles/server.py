"""A double of an engine's HTTP server: what dies, hangs and counts is the same for every program."""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

D = TypeVar("D", bound="ServerDouble")


class ServerDouble:
    """A server at a free port of this machine. A subclass implements ``respond``, and calls ``listen`` once it can.

    Attributes:
        url: its address.
        fatal: route -> number of the call that the server dies over.
        hangs: no call is answered while it is set.
        calls: route -> number of calls.
    """

    def __init__(self) -> None:
        self.fatal: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.hangs = threading.Event()
        self.released = threading.Event()
        self.dead = False
        self._pending: set[Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def listen(self) -> None:
        """Accept connections."""
        handler = type("Handler", (_Handler,), {"double": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def respond(self, route: str, body: dict[str, Any], headers: Any) -> tuple[int, Any]:
        """Return HTTP status and JSON of the answer. An exception kills the server."""
        raise NotImplementedError

    def wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the double's event loop; raises CancelledError if the server dies meanwhile."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._pending.add(future)
        try:
            return future.result(60)
        finally:
            self._pending.discard(future)

    def kill(self) -> None:
        """Break all connections and refuse new ones."""
        if not self.dead:
            self.dead = True
            self.released.set()
            threading.Thread(target=self._server.shutdown).start()
            self._server.server_close()
            for future in list(self._pending):
                future.cancel()

    def answer(self, route: str, body: dict[str, Any], headers: Any) -> tuple[int, Any]:
        """Answer a call, or die over it."""
        self.calls[route] += 1
        if self.hangs.is_set():
            self.released.wait(60)
        if self.fatal.get(route) == self.calls[route]:
            self.kill()
        if self.dead:
            raise CancelledError
        return self.respond(route, body, headers)


def _plain(value: Any) -> Any:
    """Convert what JSON does not know: numpy's numbers, columns, and anything else to text."""
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if hasattr(value, "__len__") else str(value)


@contextmanager
def starting(make: Callable[..., D]) -> Iterator[Callable[..., D]]:
    """Yield a function that starts servers with ``make``, which are killed at the end."""
    started: list[D] = []

    def start(**arguments: Any) -> D:
        started.append(make(**arguments))
        return started[-1]

    yield start
    for server in started:
        server.kill()


def write_list(directory: Path, *servers: ServerDouble) -> str:
    """Write the addresses of servers to a file, in one operation; returns the value of an option such as ``--sglang-url``."""
    (directory / "new").write_text("".join(f"{server.url}  # a comment\n" for server in servers))
    (directory / "new").rename(directory / "servers.txt")
    return f"@{directory / 'servers.txt'}"


class _Server(ThreadingHTTPServer):
    """Queues many connections. With the default queue of 5, a busy machine resets some of them."""

    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    double: ServerDouble

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        try:
            status, found = self.double.answer(self.path.strip("/").partition("?")[0], body, self.headers)
        except CancelledError:
            self.double.kill()
        except Exception:  # as SGLang's scheduler, which ends over it
            traceback.print_exc()
            self.double.kill()
        if self.double.dead:
            self.close_connection = True
            return
        text = json.dumps(found, default=_plain).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass
