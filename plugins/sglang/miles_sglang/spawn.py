"""Starts the process in which SGLang will run. It imports SGLang, which takes several seconds, and then waits for its arguments.

It is started first (``early``), in the driver or in the worker of each engine, so that SGLang is imported while the trainer loads its model.
It allocates no memory of the GPU before it receives its arguments, so the share of the GPU that SGLang takes does not depend on when it was
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_core.observe.bytecode import variables
from miles_core.plugin import StateKey

#: The module that the process runs.
WORKER = "miles_sglang.worker"


@dataclass(frozen=True)
class Spawned:
    """A process that waits for SGLang's arguments.

    Attributes:
        worker: the module that it runs.
        changes: environment variables that differ from this process's; None removes a variable.
        since: size of the log before it started.
        calls, probes: this process's ends of its connections.
        starting: the task that starts it.
    """

    worker: str
    changes: Mapping[str, str | None]
    since: int
    calls: socket.socket
    probes: socket.socket
    starting: asyncio.Task[asyncio.subprocess.Process]

    def drop(self) -> None:
        """End a process that nothing will use."""
        self.calls.close()
        self.probes.close()
        if self.starting.done():
            _kill(self.starting)
        else:
            self.starting.add_done_callback(_kill)


def spawn(worker: str, changes: Mapping[str, str | None], log_file: Path) -> Spawned:
    """Start a process with changed environment variables; its output is appended to the log. Needs a running event loop.

    It stores the bytecode of its imports even if the run's process does not (``miles_core.observe.bytecode``).
    """
    all_changes = {**variables(("torch", "transformers", "sglang")), **changes}
    environment = {name: value for name, value in os.environ.items() if name not in all_changes}
    environment |= {name: value for name, value in all_changes.items() if value is not None}
    log_file.parent.mkdir(parents=True, exist_ok=True)
    (calls, theirs), (probes, asked) = socket.socketpair(), socket.socketpair()
    output = log_file.open("ab")

    async def start() -> asyncio.subprocess.Process:
        with theirs, asked, output:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", worker, str(theirs.fileno()), str(asked.fileno()),
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=[theirs.fileno(), asked.fileno()], start_new_session=True, env=environment,
            )  # fmt: skip

    task = asyncio.get_running_loop().create_task(start())
    return Spawned(worker, changes, output.tell(), calls, probes, task)


def _kill(starting: asyncio.Task[asyncio.subprocess.Process]) -> None:
    if starting.cancelled() or starting.exception() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(starting.result().pid, signal.SIGKILL)


#: Processes that were started early, by log file.
EARLY = StateKey[dict[Path, Spawned]]()
