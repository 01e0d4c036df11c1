"""Pickled messages between two processes of one machine, whose large arrays travel in shared memory.

A message is a pickle on a pair of sockets that no other process can open. Arrays of ``SHARED`` bytes or more are written next to it: one
copy, into anonymous memory (memfd_create(2)) whose descriptor goes with the message (SCM_RIGHTS, unix(7)). The receiver maps it, so its
arrays are views; the memory is freed when the last of them is. Nothing is left if a process is killed. Without such memory (not Linux)
arrays are part of the pickle.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

#: Arrays of at least this many bytes travel in shared memory.
SHARED = 16 << 10
#: Bytes of the pickle, and number of shared arrays; then the size of each array.
_HEAD, _SIZE = struct.Struct(">QI"), struct.Struct(">Q")
#: Pages are mapped at once: a fault for each of them would take longer than the copy.
_MAP = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
#: Buffers of one ``writev``: IOV_MAX of Linux.
_PIECES = 1024


class Message:
    """An object to send, already serialized.

    Raises:
        Exception: pickle cannot serialize it.
    """

    def __init__(self, value: Any) -> None:
        self.buffers: list[memoryview] = []
        share = self._share if hasattr(os, "memfd_create") else None
        self.data = pickle.dumps(value, 5, buffer_callback=share)

    def _share(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer out of the pickle; return whether it stays there."""
        raw = buffer.raw()
        if raw.nbytes >= SHARED:
            self.buffers.append(raw)
        return raw.nbytes < SHARED

    def send(self, connection: socket.socket) -> None:
        """Write it to a blocking socket. Raises OSError if the other process has ended."""
        head = _HEAD.pack(len(self.data), len(self.buffers))
        if not self.buffers:
            connection.sendall(head)
        else:
            memory = os.memfd_create("miles-message")
            try:
                _write(memory, self.buffers)
                sent = socket.send_fds(connection, [head], [memory])
                connection.sendall(head[sent:])
            finally:
                os.close(memory)
            connection.sendall(b"".join(_SIZE.pack(buffer.nbytes) for buffer in self.buffers))
        connection.sendall(self.data)


def _write(memory: int, buffers: list[memoryview]) -> None:
    """Write all buffers one after the other."""
    left = [*buffers]
    while left:
        written = os.writev(memory, left[:_PIECES])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]


def receive(connection: socket.socket) -> Any:
    """Read one object from a blocking socket.

    Raises:
        EOFError: the other process has closed the connection.
        OSError: the connection or the shared memory failed.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, 1)
    head += _read(connection, _HEAD.size - len(head))
    size, count = _HEAD.unpack(head)
    if not count:
        return pickle.loads(_read(connection, size))
    (memory,) = descriptors
    try:
        sizes = [each for (each,) in _SIZE.iter_unpack(_read(connection, count * _SIZE.size))]
        whole = memoryview(mmap.mmap(memory, sum(sizes), _MAP))
    finally:
        os.close(memory)
    buffers, start = [], 0
    for each in sizes:
        buffers.append(whole[start : start + each])
        start += each
    return pickle.loads(_read(connection, size), buffers=buffers)


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
