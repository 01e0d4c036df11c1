"""Reports when SGLang compiles kernels. SGLang compiles on first use, which can take minutes, and logs nothing."""

from __future__ import annotations

import asyncio
import logging
from math import inf
from pathlib import Path
from time import monotonic

log = logging.getLogger(__name__)

#: Executables of the CUDA compiler.
COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "cudafe++", "fatbinary"})
#: Seconds between two checks, and between two log messages.
LOOK_S, SAY_S = 5.0, 60.0


def compilers(session: int, processes: Path = Path("/proc")) -> set[str]:
    """Return the names of the compilers that run in a process session; empty on systems without ``/proc``."""
    found = set()
    for stat in processes.glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has just ended
            continue
        if name in COMPILERS and int(rest.split()[3]) == session:
            found.add(name)
    return found


async def watch(session: int) -> None:
    """Log running compilers of a session, and when they finish, until cancelled."""
    began: float | None = None
    said = -inf
    while True:
        await asyncio.sleep(LOOK_S)
        found, now = await asyncio.to_thread(compilers, session), monotonic()
        if not found:
            if began is not None:
                log.info("SGLang's kernels are compiled (%.0f s); it keeps them for later starts", now - began)
            began, said = None, -inf
        elif began is None:
            began = now
        elif now - said > SAY_S:
            log.info("SGLang is compiling kernels for %.0f s (%s)", now - began, ", ".join(sorted(found)))
            said = now
