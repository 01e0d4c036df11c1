"""A worker in another process of this machine: both ends of a ``Channel``.

``main`` is the other end. The worker runs in an event loop in the main thread; the thread that receives answers heartbeats itself, so they
are answered while the worker computes. The process ends with the driver: the connection ends then.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_core.errors import MilesError
from miles_workers.local_channel import Channel, Message
from miles_workers.output import write_there
from miles_workers.workers import portable

#: Thread switch interval of a worker in seconds. With Python's default of 5 ms, a reward that computes would delay each system call of the
#: threads that send and receive by as much.
SWITCH = 0.0005
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
        ours, theirs = socket.socketpair()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._ended: Exception | None = None
        self._loop = asyncio.get_running_loop()
        with theirs:
            self._process = subprocess.Popen(
                # -P: files of the working directory must not replace modules
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), directory, name, level, _own_path()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, _PATH: os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # signals to the driver's group do not reach it; processes that it starts end with it
            )
        self._channel = Channel(ours, self._receive)
        self._channel.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker (``Worker.answer``), or ``make`` or ``beat``.

        Raises:
            ProcessEnded: the process has ended.
        """
        if self._ended is not None:
            raise self._ended
        number = next(self._numbers)
        message = Message((number, method, args))
        answer = self._calls[number] = self._loop.create_future()
        try:
            self._channel.send(message)
            return await answer
        finally:
            del self._calls[number]

    async def kill(self) -> None:
        """End the process and those that it started, in whatever state they are."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._channel.close()
        await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._channel.join)

    def _receive(self, message: Any, error: Exception | None) -> None:
        """Called in the channel's thread."""
        if isinstance(error, (EOFError, OSError)):
            error = ProcessEnded(self._cause())
        with contextlib.suppress(RuntimeError):  # the driver's event loop has ended
            if error is None:
                self._loop.call_soon_threadsafe(self._settle, *message)
            else:
                self._loop.call_soon_threadsafe(self._end, error)

    def _settle(self, number: int, value: Any, error: Exception | None) -> None:
        answer = self._calls.get(number)
        if answer is None or answer.done():  # the call was cancelled
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def _end(self, cause: Exception) -> None:
        self._ended = cause
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
        self.worker: Any = None
        self.closed = False
        self.loop = asyncio.new_event_loop()
        self._channel = Channel(connection, self._receive)

    def serve(self) -> None:
        """Run the worker until the driver ends the connection, which ends the process."""
        self._channel.start()
        self.loop.run_forever()

    def _receive(self, message: Any, error: Exception | None) -> None:
        """Called in the channel's thread: answer a heartbeat, or let the worker's loop answer a call; end when the driver has ended."""
        if error is not None:
            if self.closed:
                os._exit(0)
            os.killpg(
                os.getpid(), signal.SIGKILL
            )  # with the processes that it started, because the connection ended unexpectedly
        number, method, args = message
        if method == "beat":
            self._channel.send(Message((number, self.worker.beat() if self.worker is not None else (), None)))
        else:
            asyncio.run_coroutine_threadsafe(self._answer(number, method, args), self.loop)

    async def _answer(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            value: Any = None
            if method == "make":
                self.worker = _find(args[0])(*args[1:])
            else:
                value = await self.worker.answer(method, *args)
                self.closed = self.closed or method == "close"
            message = Message((number, value, None))
        except MilesError as error:
            message = Message((number, None, error))
        except Exception as error:
            message = Message((number, None, portable(error)))
        self._channel.send(message)


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
    sys.setswitchinterval(SWITCH)
    _Server(socket.socket(fileno=int(descriptor))).serve()


def process_state(process: int) -> tuple[str, int] | None:
    """Return the state letter and CPU time (clock ticks) of a process on this machine; None if it has ended. Source: proc(5)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (fields[0], int(fields[11]) + int(fields[12]))


def uses_cpu(process: int) -> bool:
    """Whether a process on this machine uses the CPU, or waits for a disk, during one second. False at once for a stopped one."""
    before = process_state(process)
    if before is None or before[0] in "Tt":
        return False
    time.sleep(1.0)
    after = process_state(process)
    if after is None or after[0] in "Tt":
        return False
    return after[1] > before[1] or after[0] == "D"


if __name__ == "__main__":
    main(*sys.argv[1:])
