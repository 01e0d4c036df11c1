"""A process on the driver's machine that reads stored objects for the driver, which sends it references only.

The process calls one function with each message and returns the result. It imports what this function needs, so no torch if that needs
none. ``LocalReader`` starts it as a child of the driver, for objects in shared memory; a runtime with another store starts it where the
store can be read.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from miles_core.errors import MilesError
from miles_workers.local_channel import Message, receive
from miles_workers.object_ref import Stored


class ReaderEnded(Exception):
    """The process has ended. The message says why, as a predicate: "ended with exit status 1"."""


class ObjectReader(ABC):
    """One process. Each ``send`` is followed by one ``receive``. The methods block and may be called in any thread, one at a time."""

    @abstractmethod
    def send(self, value: Any) -> None:
        """Send a message. Raises ReaderEnded."""

    @abstractmethod
    def receive(self) -> Any:
        """Return the answer to the last message.

        Raises:
            ReaderEnded: the process has ended.
            OSError, MilesError: raised by the function; other errors arrive as a MilesError with their traceback.
        """

    @abstractmethod
    def close(self) -> None:
        """End the process. An answer that was not received is lost."""


@runtime_checkable
class RemoteStore(Protocol):
    """A ``Stored`` that only certain processes can read."""

    def open_reader(self, target: str) -> ObjectReader:
        """Start a process that reads this object and others of its store. target: ``module:name`` of a function without arguments that
        returns the function to call with each message."""


def open_reader(stored: Stored, target: str) -> ObjectReader:
    """Start a process that reads ``stored`` and other objects of the same store; ``target`` as for ``RemoteStore.open_reader``."""
    if isinstance(stored, RemoteStore):
        return stored.open_reader(target)
    return LocalReader(target)


class LocalReader(ObjectReader):
    """A child process, which ends with the driver: its connection ends then."""

    def __init__(self, target: str) -> None:
        self._connection, theirs = socket.socketpair()
        home = str(Path(__file__).parents[1])
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self._process = subprocess.Popen(
                # -P: files of the working directory must not replace modules
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), target],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def send(self, value: Any) -> None:
        message = Message(value)
        try:
            message.send(self._connection)
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        try:
            answer, error = receive(self._connection)
        except (EOFError, OSError) as ended:
            raise self._ended() from ended
        if error is not None:
            raise error
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.wait()

    def _ended(self) -> ReaderEnded:
        self._connection.close()
        status = self._process.wait()
        return ReaderEnded(f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}")


def make_answer(function: Callable[[Any], Any], value: Any) -> tuple[Any, Exception | None]:
    """Return the function's result and None, or None and an error that another process can raise."""
    try:
        return function(value), None
    except OSError as error:
        return None, OSError(error.errno, error.strerror)
    except MilesError as error:
        return None, error
    except Exception:
        return None, MilesError(traceback.format_exc())


def load_function(target: str) -> Callable[[Any], Any]:
    """Return the function that ``target`` makes, see ``RemoteStore.open_reader``."""
    module, _, name = target.partition(":")
    function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)()
    return function


def main(descriptor: str, target: str) -> None:
    """Answer messages until the driver closes the connection."""
    for each in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a run; the driver decides when to end
        signal.signal(each, signal.SIG_IGN)
    os.dup2(2, 1)
    connection, function = socket.socket(fileno=int(descriptor)), load_function(target)
    while True:
        try:
            value = receive(connection)
        except (EOFError, OSError, pickle.UnpicklingError):
            return
        answer = make_answer(function, value)
        del value  # frees the memory of its objects before the next message
        try:
            Message(answer).send(connection)
        except OSError:  # the driver has ended
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
