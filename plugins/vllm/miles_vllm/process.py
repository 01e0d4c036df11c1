"""Runs vLLM in a process of its own (``host``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.plugin import MilesError
from miles_vllm import host
from miles_vllm.link import Link
from miles_workers import EngineLost, LocalProcess, ProcessEnded, last_lines

log = logging.getLogger(__name__)

#: Seconds in which vLLM may stop by itself.
_END_S = 20.0


@dataclass(frozen=True)
class Launch:
    """How to start vLLM.

    Attributes:
        arguments: arguments of vLLM's ``AsyncEngineArgs``.
        environment: environment variables of vLLM's processes.
        expected: the arguments of ``Host.expect``.
        directory, name: run directory and name of vLLM's process, which name the file of its output.
        startup_timeout: seconds to wait until vLLM is ready.
    """

    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    expected: Sequence[Any]
    directory: Path
    name: str = "vllm"
    startup_timeout: float = 900.0


class ProcessLink(Link):
    """vLLM in a process that this run starts.

    Args:
        launch: how to start vLLM.
        start: starts the process; a test passes one without vLLM.
    """

    def __init__(self, launch: Launch, start: Callable[[str, str, str], LocalProcess] = LocalProcess) -> None:
        self.launch, self.start_process = launch, start
        self._process: LocalProcess | None = None

    async def start(self) -> None:
        given = self.launch
        self._process = self.start_process(str(given.directory), given.name, "info")
        try:
            made = self.call("make", host.NAME, dict(given.arguments), dict(given.environment))
            await asyncio.wait_for(made, given.startup_timeout)
            await self.call("expect", *given.expected)
        except TimeoutError:
            await self.stop()
            late = f"vLLM was not ready within {given.startup_timeout:g} s (--vllm-startup-timeout)"
            raise EngineLost(late, self._last_lines()) from None
        except host.StartError as error:
            await self.stop()
            raise EngineLost(str(error), self._last_lines()) from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            try:
                await asyncio.wait_for(process.call("close"), _END_S)
            except Exception as error:  # it is stuck, has died, or did not start
                log.debug("vLLM's process %d did not stop by itself: %s", process.pid, error)
            await process.kill()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def call(self, method: str, *args: Any) -> Any:
        if self._process is None:
            raise MilesError("vLLM is not running: the engine was not started, or was stopped")
        try:
            return await self._process.call(method, *args)
        except ProcessEnded as ended:
            raise EngineLost(f"vLLM died: {ended}", self._last_lines()) from ended

    def _last_lines(self) -> tuple[str, ...]:
        return last_lines(self.launch.directory, self.launch.name)
