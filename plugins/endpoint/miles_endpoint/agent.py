"""Runs an agent for one sample: a program in a separate process, or a Python function.

A program receives the prompt's row as JSON on standard input, and ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its environment. Its last
line of standard output may be a JSON object, its result. A function is called with a ``Task`` and returns its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from miles_core.chat import call_in_thread, import_code
from miles_core.data import describe_error, valid_data
from miles_core.plugin import ConfigError

#: Number of bytes kept of each stream of an agent's output, from its end.
KEPT = 64 * 1024
#: Seconds between SIGTERM and SIGKILL of a process.
GRACE = 5.0
#: Variables that make common libraries bypass proxies for a server on this machine.
_ENVIRONMENT = {
    "NO_PROXY": "127.0.0.1,localhost,::1",
    "no_proxy": "127.0.0.1,localhost,::1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
_FUNCTION = re.compile(r"(?P<module>[A-Za-z_][\w.]*|\S+\.py):(?P<name>[A-Za-z_]\w*)")


class AgentFailed(Exception):
    """Raised if an agent crashes; the message says how."""


@dataclass(frozen=True)
class Task:
    """The work of an agent.

    Attributes:
        row: ``prompt``, ``label``, ``metadata`` and ``sample`` (the number) of the prompt.
        base_url: base URL of the endpoint.
        api_key: API key of this sample.
        model: name of the sample's model.
    """

    row: Mapping[str, Any]
    base_url: str
    api_key: str
    model: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a program that works on this task."""
        return {
            **_ENVIRONMENT,
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
        }


class Agent(ABC):
    """Runs an agent."""

    @abstractmethod
    async def run(self, task: Task) -> Any:
        """Run the agent for one sample and return its result. A cancelled call ends the agent.

        Raises:
            AgentFailed: the agent crashed.
        """

    def stop(self) -> None:
        """Release what all samples share."""


class ProcessAgent(Agent):
    """One process per sample.

    Args:
        command: the command and its arguments.
    """

    def __init__(self, command: list[str]) -> None:
        self.command = command

    async def run(self, task: Task) -> Any:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not re.fullmatch(r"MILES_\w*(TOKEN|KEY|SECRET)\w*", name)
        }
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: _Exit(2**16, loop), *self.command, env=inherited | task.environment, start_new_session=True
        )
        assert protocol.stdin and protocol.stdout and protocol.stderr
        streams = [asyncio.ensure_future(_read_end(stream)) for stream in (protocol.stdout, protocol.stderr)]
        try:
            with contextlib.suppress(ConnectionError):  # the agent need not read its input
                protocol.stdin.write(json.dumps(task.row, default=str).encode() + b"\n")
                await protocol.stdin.drain()
                protocol.stdin.close()
            await protocol.exited.wait()
            _kill(transport.get_pid(), signal.SIGKILL)  # processes that the agent left hold its streams open
            output, errors = await asyncio.gather(*streams)
        finally:
            await _end(transport, protocol, streams)
        if status := transport.get_returncode():
            last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            raise AgentFailed(f"its process ended with {how}: {last.strip()[:300]}")
        return _result(output)


class _Exit(asyncio.subprocess.SubprocessStreamProtocol):
    """Streams of a process, and the event of its end. ``Process.wait`` also waits until all its children close the streams."""

    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit, loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


async def _read_end(stream: asyncio.StreamReader) -> str:
    """Read a stream to its end and return its last ``KEPT`` bytes as text."""
    kept = b""
    while data := await stream.read(2**16):
        kept = (kept + data)[-KEPT:]
    return kept.decode(errors="replace")


async def _end(transport: asyncio.SubprocessTransport, protocol: _Exit, streams: Sequence[asyncio.Future[str]]) -> None:
    """End the process and all processes that it started: first with SIGTERM, then with SIGKILL."""
    if not protocol.exited.is_set():
        _kill(transport.get_pid(), signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await protocol.exited.wait()
    _kill(transport.get_pid(), signal.SIGKILL)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await protocol.exited.wait()
    transport.close()


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _result(output: str) -> Any:
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    try:
        value = valid_data(json.loads(last))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, int, float)) else None


class FunctionAgent(Agent):
    """Calls a Python function: a plain one in a thread per sample, an async one in an event loop that only agents use.

    Args:
        function: takes a ``Task``.
    """

    def __init__(self, function: Callable[[Task], Any]) -> None:
        self.function = function
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, task: Task) -> Any:
        try:
            if inspect.iscoroutinefunction(self.function):
                work = asyncio.run_coroutine_threadsafe(_contain(self.function, task), self._own_loop())
                return await asyncio.wrap_future(work)
            # a thread cannot be killed: one that hangs keeps running, but its API key is no longer valid
            return await call_in_thread(partial(_contain_call, self.function, task), "agent")
        except AgentFailed:
            raise
        except Exception as error:
            raise _left(error) from error

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
        return self._loop

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


async def _contain(function: Callable[[Task], Any], task: Task) -> Any:
    """Call an async function; an exception that would end the event loop of all agents, such as ``SystemExit``, ends only this agent."""
    try:
        return await function(task)
    except (SystemExit, KeyboardInterrupt) as error:
        raise _left(error) from error


def _contain_call(function: Callable[[Task], Any], task: Task) -> Any:
    """Call a plain function; see ``_contain``."""
    try:
        return function(task)
    except (SystemExit, KeyboardInterrupt) as error:
        raise _left(error) from error


def _left(error: BaseException) -> AgentFailed:
    return AgentFailed(f"it raised {describe_error(error)[:400]}")


def make_agent(command: str) -> Agent:
    """Make the agent of ``--agent``.

    Raises:
        ConfigError: there is no such program, module or function.
    """
    found = _FUNCTION.fullmatch(command.strip())
    if found:
        return FunctionAgent(_load_function(found["module"], found["name"], command))
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--agent {command!r}: {error}") from error
    if not words:
        raise ConfigError("--agent is empty; give a command line, MODULE:FUNCTION or FILE.py:FUNCTION")
    if shutil.which(words[0]) is None:
        raise ConfigError(f"--agent {command!r}: there is no program {words[0]!r} on the PATH")
    return ProcessAgent(words)


def _load_function(module: str, name: str, command: str) -> Callable[[Task], Any]:
    if not module.endswith(".py") and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    loaded = import_code(module, "agents", f"--agent {command}")
    function = getattr(loaded, name, None)
    if not callable(function):
        names = [key for key, value in vars(loaded).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ConfigError(f"--agent {command}: {module} has no function {name}; it has: {', '.join(names) or 'none'}")
    made: Callable[[Task], Any] = function
    return made
