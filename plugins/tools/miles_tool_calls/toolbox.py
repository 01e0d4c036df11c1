"""All tools of a run by name; calls each kind in a different way.

Plain functions run in worker processes (``pool``); async functions are awaited in the run's event loop; methods of a class run in threads,
on the instance of the sample; tools of MCP servers go to their server.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from miles_core.chat import call_in_thread
from miles_core.data import Sample, describe_error
from miles_core.plugin import ConfigError, OutOfTime
from miles_tool_calls.config import ToolsConfig
from miles_tool_calls.functions import Function, cut, load_functions, to_answer
from miles_tool_calls.outcome import Outcome, ToolFault
from miles_tool_calls.pool import Pool
from miles_tool_calls.servers import Server, read_servers

log = logging.getLogger(__name__)

#: Seconds that ``close`` of an instance may take.
CLOSE = 30.0


class Toolbox:
    """The tools of a run.

    Args:
        options: the plugin's options.

    Raises:
        ConfigError: a file cannot be loaded, or two tools have one name.
    """

    def __init__(self, options: ToolsConfig) -> None:
        self.functions: dict[str, Function] = {}
        for function in load_functions(options.functions):
            self._claim(function.name, function.spec)
            self.functions[function.name] = function
        listed = read_servers(options.mcp_servers) if options.mcp_servers else {}
        self.servers = [Server(name, entry) for name, entry in listed.items()]
        self.remote: dict[str, Server] = {}
        specs = tuple(dict.fromkeys(f.spec for f in self.functions.values() if _runs_in_worker(f)))
        self.pool = Pool(specs, options.workers) if specs else None
        self._limit = asyncio.Semaphore(options.concurrency)

    def _claim(self, name: str, origin: str) -> None:
        """Raise ConfigError if another tool has this name."""
        other = self.functions.get(name)
        taken = other.spec if other else self.remote[name].name if name in getattr(self, "remote", {}) else None
        if taken is not None:
            raise ConfigError(
                f"two tools have the name {name!r} ({taken} and {origin}); rename one, choose functions with FILE.py:NAME, or "
                'choose the tools of a server with "tools": [...]'
            )

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of all tools; those of servers exist after ``start``."""
        own = [function.schema for function in self.functions.values()]
        return own + [server.schemas[name] for name, server in self.remote.items()]

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Tool name -> JSON schema of its parameters."""
        return {one["function"]["name"]: one["function"]["parameters"] for one in self.schemas}

    async def start(self) -> None:
        """Connect to the servers.

        Raises:
            ConfigError: a server cannot be reached, or a tool has the name of another one.
        """
        for server in self.servers:
            await server.start()
            for name in server.schemas:
                self._claim(name, server.name)
                self.remote[name] = server

    async def stop(self) -> None:
        """Close the connections and end the processes."""
        for server in self.servers:
            await server.stop()
        self.remote.clear()
        if self.pool is not None:
            await self.pool.close()

    @asynccontextmanager
    async def open(self, sample: Sample) -> AsyncIterator[Session]:
        """Make the instances of a sample, and close them after the body."""
        session = Session(self, sample)
        try:
            yield session
        finally:
            await session.close()

    async def limited(self, awaitable: Callable[[], Any], seconds: float) -> Any:
        """Await a call under the limit of concurrent calls; the time limit begins when it starts.

        Raises:
            TimeLimitExceeded: the call took longer than ``seconds``. A ``TimeoutError`` comes from the tool.
        """
        async with self._limit:
            limit = asyncio.timeout(seconds)
            try:
                async with limit:
                    return await awaitable()
            except TimeoutError:
                if limit.expired():
                    raise TimeLimitExceeded from None
                raise


class TimeLimitExceeded(Exception):
    """A call took longer than its time limit; not a ``TimeoutError``, which a tool may raise itself."""


def _runs_in_worker(function: Function) -> bool:
    return function.owner is None and not function.is_async


class Session:
    """The tools of one sample: instances are made when a method is first called."""

    def __init__(self, box: Toolbox, sample: Sample) -> None:
        self.box, self.sample = box, sample
        self._instances: dict[type, asyncio.Task[Any]] = {}

    async def call(self, name: str, arguments: dict[str, Any], seconds: float, limit: int) -> Outcome:
        """Call a tool.

        Raises:
            ToolFault: an instance cannot be made, or a server is gone.
        """
        if name in self.box.remote:
            server = self.box.remote[name]
            async with self.box._limit:
                return await server.call(name, arguments, seconds, limit)
        function = self.box.functions.get(name)
        if function is None:
            known = ", ".join(self.box.parameters)
            return Outcome.error(f"there is no tool {name!r:.80}; the tools are: {known}")
        if _runs_in_worker(function):
            assert self.box.pool is not None  # made with the functions
            return await self.box.pool.call(name, arguments, seconds, limit)
        return await self._call_here(function, arguments, seconds, limit)

    async def _call_here(self, function: Function, arguments: dict[str, Any], seconds: float, limit: int) -> Outcome:
        """Call an async function or method in the event loop, or another method in a thread: instances live in this process.

        Raises:
            ToolFault: the instance cannot be made.
        """
        try:
            bound = function.bind(arguments)
        except ValueError as error:
            return Outcome.error(cut(f"wrong arguments: {error}", limit))
        target: Callable[..., Any] = function.function
        if function.owner is not None:
            target = getattr(await self._instance(function.owner), function.name)
        try:
            if function.is_async:
                value = await self.box.limited(lambda: target(**bound), seconds)
            else:
                value = await self.box.limited(lambda: call_in_thread(lambda: target(**bound), "tool"), seconds)
            return Outcome(**to_answer(value, limit))
        except TimeLimitExceeded:
            text = f"Error: the call took longer than {seconds:g} seconds and was ended"
            return Outcome(text, failed=True, broken=not function.is_async)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the sample is cancelled; otherwise the tool raised it
                raise
            return Outcome.error("CancelledError")
        except (KeyboardInterrupt, OutOfTime, GeneratorExit):
            raise
        except BaseException as error:  # also sys.exit, and the panics of libraries in Rust
            return Outcome.error(cut(describe_error(error), limit))

    async def _instance(self, owner: type) -> Any:
        if owner not in self._instances:
            takes = [p for p in inspect.signature(owner).parameters.values() if p.default is p.empty]
            positional = [p for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            given = (self.sample.metadata,) if positional else ()
            self._instances[owner] = asyncio.ensure_future(call_in_thread(lambda: owner(*given), "tool"))
        try:
            return await asyncio.shield(self._instances[owner])
        except Exception as error:
            raise ToolFault(
                f"the tool class {owner.__name__} cannot be instantiated: {describe_error(error)}"
            ) from error

    async def close(self) -> None:
        """Close the instances; a failure to close is logged."""
        for owner, task in self._instances.items():
            if task.done() and (task.cancelled() or task.exception() is not None):
                continue
            try:
                async with asyncio.timeout(CLOSE):
                    await self._close(await task)
            except Exception as error:
                log.warning("sample %s: closing its %s raised %r", self.sample.index, owner.__name__, error)

    async def _close(self, instance: Any) -> None:
        close = getattr(instance, "close", None)
        if inspect.iscoroutinefunction(close):
            await close()
        elif close is not None:
            await call_in_thread(close, "tool")
