"""Whether Ray's own processes are there: the control store (GCS) of the cluster, and the raylet of this machine.

Ray itself ends the driver without a message some time after one of them has died. The run notices it first, and ends with an error
and, where the trainer's processes are still reachable, with a checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import ray

#: Seconds between two looks, and how many of them in a row find nothing that listens before a process counts as dead.
LOOK, LOOKS = 1.0, 3
#: Seconds in which a connection is made; a process that takes longer is busy.
CONNECT = 5.0
#: Names in messages.
GCS, RAYLET = "the control store (gcs_server) of Ray", "Ray's process of this machine (raylet)"


async def first_death() -> str:
    """Wait until one of the processes is gone; ``GCS`` or ``RAYLET``."""
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
    """Whether a connection is accepted."""
    try:
        async with asyncio.timeout(CONNECT):
            _, writer = await opening
    except TimeoutError:
        return True
    except OSError:
        return False
    writer.close()
    return True
