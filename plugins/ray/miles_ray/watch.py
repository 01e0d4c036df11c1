"""Notices the death of Ray's own processes: the control store (GCS) of the cluster, and the raylet of this machine.

Ray ends the driver without a message soon after one of them has died. A connection to each process stays open: the operating system
closes it when the process dies, so the run notices within milliseconds and ends with an error and, where the trainer's processes are
still reachable, with a checkpoint.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from functools import lru_cache

import ray

from miles_workers import process_state

#: Seconds between two attempts to connect, and the number of refused attempts in a row after which a process counts as dead.
LOOK, LOOKS = 0.1, 3
#: Seconds until a connection must be accepted; a process that takes longer is busy.
CONNECT = 5.0
#: Names in messages.
GCS, RAYLET = "the control store (gcs_server) of Ray", "Ray's process of this machine (raylet)"

Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def first_death() -> str:
    """Wait until one of the processes has died.

    Returns:
        ``GCS`` or ``RAYLET``.
    """
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    path = _raylet_socket()
    watches = {
        asyncio.ensure_future(death(lambda: asyncio.open_unix_connection(path), file=True)): RAYLET,
        asyncio.ensure_future(death(lambda: asyncio.open_connection(host.strip("[]"), int(port)))): GCS,
    }
    try:
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        return watches[done.pop()]
    finally:
        for watch in watches:
            watch.cancel()


async def death(connect: Open, file: bool = False) -> None:
    """Return when the process that accepts these connections has died.

    Args:
        connect: opens a connection; raises OSError where it is refused.
        file: the connection is to a socket file, where one refusal is enough. Ray ends this process when it writes to a dead raylet, so
        there is no time for another attempt.
    """
    refused = 0
    while refused < LOOKS:
        try:
            async with asyncio.timeout(CONNECT):
                reader, writer = await connect()
        except TimeoutError:
            continue
        except OSError as error:
            if file and isinstance(error, ConnectionRefusedError):
                return
            refused += 1
            await asyncio.sleep(LOOK)
            continue
        refused = 0
        try:
            while await reader.read(4096):
                pass
        except OSError:
            pass
        finally:
            writer.close()
        await asyncio.sleep(LOOK / 10)  # a process that lives may close a connection that sends nothing


def raylet_lives() -> bool:
    """Whether the raylet of this machine is alive. To call before ``ray.put``, which exits this process without one."""
    try:
        connection = _connect(_raylet_socket())
        if hasattr(
            socket, "SO_PEERCRED"
        ):  # Linux: a process that was killed may keep its sockets for some milliseconds
            peer = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            if peer[0] and process_state(peer[0]) is None:  # 0: of another container
                return False
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@lru_cache
def _connect(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.connect(path)
    made.setblocking(False)
    return made


def _raylet_socket() -> str:
    node = ray._private.worker._global_node
    assert node is not None  # this process is connected to a cluster
    return str(node.raylet_socket_name)
