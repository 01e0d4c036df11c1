"""Pickled messages between two processes of one machine, whose large arrays travel in shared memory.

A message is a pickle on a pair of sockets that no other process can open. Arrays of ``SHARED`` bytes or more, and the pickle if it is as
large, are written next to it: one copy, into anonymous memory (memfd_create(2)) whose descriptor goes with the message (SCM_RIGHTS,
unix(7)). The receiver maps it, so its arrays are views; the memory is freed when the last of them is. Stored objects have separate memory
of this kind, which the receiver maps only when it reads them. The memory is freed even if a process is killed. On systems other than Linux
everything is part of the pickle.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import queue
import resource
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from miles_core.errors import MilesError
from miles_workers.object_ref import SHARED, ObjectRef, split_buffers, take_large, write_buffers

#: Bytes of the pickle, number of large arrays, and number of stored objects; then the size of each array.
_HEAD, _SIZE = struct.Struct(">QII"), struct.Struct(">Q")
#: Largest number of descriptors in one message of a socket: SCM_MAX_FD of Linux.
_DESCRIPTORS = 253
#: Limit of open files that ``raise_file_limit`` sets at most.
MOST_FILES = 1 << 20


class _Pickler(pickle.Pickler):
    """Takes object references out of the pickle."""

    def __init__(self, file: io.BytesIO, take: Callable[[memoryview], object] | None) -> None:
        super().__init__(file, 5, buffer_callback=None if take is None else take_large(take))
        self.refs: dict[ObjectRef, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not ObjectRef or not value.shareable:
            return None
        return self.refs.setdefault(value, len(self.refs))


class _Unpickler(pickle.Unpickler):
    """Puts object references back. descriptors: of their memory; a reference takes over its own, which is removed from ``opened``."""

    def __init__(self, data: memoryview, buffers: list[np.ndarray], descriptors: list[int], opened: set[int]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._refs: dict[int, ObjectRef] = {}
        self._descriptors, self._opened = descriptors, opened

    def persistent_load(self, number: Any) -> ObjectRef:
        if number not in self._refs:
            descriptor = self._descriptors[number]
            self._opened.remove(descriptor)
            self._refs[number] = ObjectRef([], descriptor)
        return self._refs[number]


class Message:
    """An object to send, already serialized.

    Raises:
        Exception: pickle cannot serialize it.
    """

    def __init__(self, value: Any) -> None:
        self.buffers: list[memoryview] = []
        data = io.BytesIO()
        pickler = _Pickler(data, self.buffers.append if hasattr(os, "memfd_create") else None)
        pickler.dump(value)
        self.data, self.refs = data.getbuffer(), [*pickler.refs]

    def send(self, connection: socket.socket) -> None:
        """Write it to a blocking socket. Raises OSError if the other process has ended."""
        descriptors = [ref.share() for ref in self.refs]
        buffers, data = [*self.buffers], self.data
        if len(data) >= SHARED and hasattr(os, "memfd_create"):  # a socket takes 200 KB at a time
            buffers, data = [*buffers, data], memoryview(b"")
        sizes = b"".join(_SIZE.pack(buffer.nbytes) for buffer in buffers)
        head = _HEAD.pack(len(data), len(buffers), len(self.refs))
        if not buffers and not descriptors:
            connection.sendall(head + data)
            return
        if not buffers:
            connection.sendall(head)
        else:
            memory = write_buffers(buffers)
            try:
                sent = socket.send_fds(connection, [head], [memory])
                connection.sendall(head[sent:])
            finally:
                os.close(memory)
        for start in range(0, len(descriptors), _DESCRIPTORS):
            socket.send_fds(connection, [b" "], descriptors[start : start + _DESCRIPTORS])
        if rest := sizes + data:
            connection.sendall(rest)


def receive(connection: socket.socket) -> Any:
    """Read one object from a blocking socket.

    Raises:
        EOFError: the other process has closed the connection.
        OSError: the connection or the shared memory failed.
        MilesError: this process may open no more files.
    """
    opened: set[int] = set()
    try:
        return _receive(connection, opened)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _receive(connection: socket.socket, opened: set[int]) -> Any:
    """Implement ``receive``. opened: collects the descriptors that the caller must close."""
    head, memory, _, _ = socket.recv_fds(connection, _HEAD.size, 1)
    opened.update(memory)
    head += _read(connection, _HEAD.size - len(head))
    size, count, refs = _HEAD.unpack(head)
    if count and not memory:
        raise _missing()
    descriptors: list[int] = []
    while len(descriptors) < refs:
        mark, more, _, _ = socket.recv_fds(connection, 1, _DESCRIPTORS)
        opened.update(more)
        if not mark:
            raise EOFError
        if len(more) < min(refs - len(descriptors), _DESCRIPTORS):
            raise _missing()
        descriptors += more
    rest = memoryview(_read(connection, count * _SIZE.size + size))
    buffers: list[np.ndarray] = []
    if count:
        buffers = split_buffers(memory[0], [each for (each,) in _SIZE.iter_unpack(rest[: count * _SIZE.size])])
    data = rest[count * _SIZE.size :] if size else buffers.pop().data
    return _Unpickler(data, buffers, descriptors, opened).load()


def _missing() -> MilesError:
    """Return the error for descriptors that did not arrive."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MilesError(f"this process may open {limit} files and needs one per group of samples; raise ulimit -n")


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MOST_FILES) if hard != resource.RLIM_INFINITY else MOST_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _read(connection: socket.socket, size: int) -> bytearray:
    """Read exactly ``size`` bytes."""
    data = bytearray(size)
    view, start = memoryview(data), 0
    while start < size:
        if not (count := connection.recv_into(view[start:])):
            raise EOFError
        start += count
    return data


class Channel:
    """One end of the connection, with a thread that sends and one that receives, so that neither blocks an event loop.

    Args:
        connection: a blocking socket.
        received: called in the receiving thread with each object; at last with an exception: ``EOFError`` or ``OSError`` when the connection
            has ended, another one if an object cannot be read.
    """

    def __init__(self, connection: socket.socket, received: Callable[[Any, Exception | None], None]) -> None:
        self._connection, self._received = connection, received
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._send_all, self._receive_all)]

    def start(self) -> None:
        """Start to send and receive."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Send an object soon. If the connection has ended, ``received`` gets the error."""
        self._outgoing.put(message)

    def close(self) -> None:
        """End the connection; the threads end, too."""
        self._outgoing.put(None)
        with contextlib.suppress(OSError):  # the other process has closed it
            self._connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until both threads have ended."""
        for thread in self._threads:
            thread.join()
        self._connection.close()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):  # the connection has ended, which the other thread notices
            while (message := self._outgoing.get()) is not None:
                message.send(self._connection)

    def _receive_all(self) -> None:
        try:
            while True:
                self._received(receive(self._connection), None)
        except Exception as error:
            self._received(None, error)
