"""Requests in flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(eq=False)
class Call:
    """One request in flight.

    Attributes:
        sent: SGLang has it; otherwise it waits for ``resume``.
        aborted: ``abort`` selected it.
        stirred: set by ``abort`` to wake a request that waits.
    """

    key: int
    rid: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    sent: bool = False
    aborted: bool = False
