"""Watches Ray's own processes: the control store (GCS) of the cluster, and the raylet of this machine.

Some time after one of them died, Ray ends the driver without a message. The run detects the death earlier, and ends with an error and, if
the trainer's processes are still reachable, a checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import ray

#: Seconds between two checks, and the number of consecutive failures after which a process counts as dead.
LOOK, LOOKS = 1.0, 3
#: Connection timeout in seconds; a process that takes longer is busy, not dead.
CONNECT = 5.0
#: Names in messages.
GCS, RAYLET = "the control store (gcs_server) of Ray", "Ray's process of this machine (raylet)"


async def first_death() -> str:
    """Wait until one of the processes has died; returns ``GCS`` or ``RAYLET``."""
    missed = {GCS: 0, RAYLET: 0}
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    node = ray._private.worker._global_node
    assert node is not None  # connected
    socket = node.raylet_socket_name
    while True:
        await asyncio.sleep(LOOK)
        found = {
            RAYLET: await listens(asyncio.open_unix_connection(socket)),
            GCS: await listens(asyncio.open_connection(host.strip("[]"), int(port))),
        }
        for name, there in found.items():
            missed[name] = 0 if there else missed[name] + 1
            if missed[name] >= LOOKS:
                return name


async def listens(opening: Awaitable[Any]) -> bool:
    """Whether a process accepts the connection; True on timeout."""
    try:
        async with asyncio.timeout(CONNECT):
            _, writer = await opening
    except TimeoutError:
        return True
    except OSError:
        return False
    writer.close()
    return True
