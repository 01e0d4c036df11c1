"""A worker in another process of this machine: both ends of the connection.

The processes exchange pickled messages on a pair of sockets that no other process can open. ``main`` is the other end: the worker runs in
an event loop of its own in a second thread, so that heartbeats are answered while it computes. The process ends with the driver: the
connection ends then.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_runtime.mailbox import portable
from miles_runtime.output import write_there

#: Length of a message in bytes, before each message.
_HEAD = struct.Struct(">Q")
#: The worker's process imports modules from where the driver does.
_PATH = "PYTHONPATH"


class ProcessEnded(Exception):
    """The process has ended; the message is the cause."""


class LocalProcess:
    """The driver's end.

    Args:
        directory: the run directory.
        name: name of the worker, and of the file of its output.
        level: log level.
    """

    def __init__(self, directory: str, name: str, level: str) -> None:
        self._ours, theirs = socket.socketpair()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        with theirs:
            self._process = subprocess.Popen(
                # -P: files of the working directory must not replace modules
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), directory, name, level, _own_path()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, _PATH: os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # signals to the driver's group do not reach it; processes that it starts end with it
            )

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    async def open(self) -> None:
        """Start reading answers."""
        reader, self._writer = await asyncio.open_connection(sock=self._ours)
        self._reading = asyncio.create_task(self._read(reader))

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker (``Worker.answer``), or ``make`` or ``beat``.

        Raises:
            ProcessEnded: the process has ended.
        """
        if self._writer is None or self._reading is None or self._reading.done():
            raise ProcessEnded(self._cause())
        number = next(self._numbers)
        message = pickle.dumps((number, method, args), 5)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            with contextlib.suppress(ConnectionError):  # ``_read`` notices it, too
                self._writer.writelines([_HEAD.pack(len(message)), message])
                await self._writer.drain()
            return await answer
        finally:
            del self._calls[number]

    async def kill(self) -> None:
        """End the process and those that it started, in whatever state they are."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        if self._writer is not None:
            self._writer.close()
        else:
            self._ours.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                number, value, error = pickle.loads(await reader.readexactly(size))
                answer = self._calls.get(number)
                if answer is None or answer.done():  # the call was cancelled
                    continue
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(error)
        except Exception as error:
            ended = isinstance(error, (asyncio.IncompleteReadError, ConnectionError))
            cause: Exception = ProcessEnded(await asyncio.to_thread(self._cause)) if ended else error
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_exception(cause)

    def _cause(self) -> str:
        """Return why the process ended."""
        try:
            status = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        if status >= 0:
            return f"its process ended with exit status {status}"
        how = f"signal {-status} ({signal.Signals(-status).name})"
        return f"its process was killed by {how}" + (", perhaps because memory is short" if status == -9 else "")


class _Server:
    """The worker's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.worker, self.closed = connection, None, False
        self.loop = asyncio.new_event_loop()
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Answer calls until the connection ends."""
        threading.Thread(target=self.loop.run_forever, name="worker", daemon=True).start()
        with self.connection.makefile("rb") as stream:
            while head := stream.read(_HEAD.size):
                number, method, args = pickle.loads(stream.read(*_HEAD.unpack(head)))
                if method == "beat":
                    self._send(number, self.worker.beat() if self.worker is not None else ())
                else:
                    asyncio.run_coroutine_threadsafe(self._answer(number, method, args), self.loop)

    async def _answer(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            if method == "make":
                self.worker = _find(args[0])(*args[1:])
                value = None
            else:
                assert self.worker is not None  # ``make`` is called first
                value = await self.worker.answer(method, *args)
                self.closed = self.closed or method == "close"
            self._send(number, value)
        except Exception as error:
            self._send(number, None, portable(error))

    def _send(self, number: int, value: Any, error: Exception | None = None) -> None:
        message = pickle.dumps((number, value, error), 5)
        with self._sending, contextlib.suppress(OSError):  # the driver has ended, which ``serve`` notices
            self.connection.sendall(_HEAD.pack(len(message)))
            self.connection.sendall(message)


def _find(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _own_path() -> str:
    return os.environ.get(_PATH, "")


def main(descriptor: str, directory: str, name: str, level: str, path: str) -> None:
    """Run a worker until the driver ends the connection. path: the user's PYTHONPATH, for processes that the worker starts."""
    os.environ[_PATH] = path
    for each in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a run; the driver decides when to end
        signal.signal(each, signal.SIG_IGN)
    write_there(directory, name, level)
    server = _Server(socket.socket(fileno=int(descriptor)))
    with contextlib.suppress(OSError, EOFError):
        server.serve()
    if server.closed:
        os._exit(0)
    os.killpg(
        os.getpid(), signal.SIGKILL
    )  # with the processes that it started: the driver has ended without a farewell


def process_state(process: int) -> tuple[str, int] | None:
    """Return the state letter and CPU time (clock ticks) of a process on this machine; None if it has ended. Source: proc(5)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (fields[0], int(fields[11]) + int(fields[12]))


if __name__ == "__main__":
    main(*sys.argv[1:])
