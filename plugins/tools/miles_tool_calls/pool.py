"""Worker processes that call the plain functions of ``--tools``; a call that takes too long ends with its process.

A process calls one function at a time. Processes start when they are needed, up to ``--tool-workers``, and are used again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any

from miles_core.plugin import ConfigError
from miles_tool_calls.outcome import Outcome, ToolFault
from miles_tool_calls.worker import LENGTH, encode_message

#: Seconds in which a worker must have imported the tools.
START = 120.0


class Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, specs: tuple[str, ...]) -> Worker:
        """Start a process and import the tools in it.

        Raises:
            ConfigError: the import fails there.
            ToolFault: the process ended.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "miles_tool_calls.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(START):
                answer = await worker.ask({"specs": list(specs)})
        except TimeoutError:
            await worker.kill()
            raise ToolFault(f"a process for tools did not start within {START:g} seconds") from None
        except BaseException:
            await worker.kill()
            raise
        if "fault" in answer:
            await worker.kill()
            raise ConfigError(f"in a process for tools: {answer['fault']}")
        return worker

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and wait for the answer.

        Raises:
            ToolFault: the process ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(encode_message(message))
            await self.process.stdin.drain()
            head = await self.process.stdout.readexactly(LENGTH.size)
            answer: dict[str, Any] = json.loads(await self.process.stdout.readexactly(LENGTH.unpack(head)[0]))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ToolFault(f"its process ended with the exit code {await self.process.wait()}") from error
        return answer

    async def kill(self) -> None:
        """End the process and all processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


class Pool:
    """Up to ``size`` processes.

    Args:
        specs: the specifications of ``--tools``.
        size: largest number of processes.
    """

    def __init__(self, specs: tuple[str, ...], size: int) -> None:
        self.specs = specs
        self._free = asyncio.Semaphore(size)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    async def call(self, name: str, arguments: dict[str, Any], seconds: float, limit: int) -> Outcome:
        """Call a function; the time limit begins when a process is free.

        Returns:
            the result or the error for the model. An exception of the function, a call that takes too long and a function that ends its
            process are errors for the model.
        """
        try:
            message = {"name": name, "arguments": arguments, "limit": limit}
            json.dumps(message, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return Outcome.error(f"wrong arguments: {error}")
        async with self._free:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(seconds):
                    answer = await worker.ask(message)
            except TimeoutError:
                await self._end(worker)
                return Outcome.error(f"the call took longer than {seconds:g} seconds and was ended")
            except ToolFault as fault:
                await self._end(worker)
                return Outcome.error(str(fault))
            except BaseException:  # the sample was dropped; the process is in the middle of a call
                await self._end(worker)
                raise
            self._idle.append(worker)
        return Outcome(**answer) if "text" in answer else Outcome.error(answer["error"])

    async def close(self) -> None:
        """End all processes."""
        for worker in list(self._all):
            await self._end(worker)
        self._idle.clear()

    async def _start(self) -> Worker:
        worker = await Worker.start(self.specs)
        self._all.add(worker)
        return worker

    async def _end(self, worker: Worker) -> None:
        self._all.discard(worker)
        await asyncio.shield(worker.kill())
