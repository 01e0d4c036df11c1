"""Tools of MCP servers (Model Context Protocol, modelcontextprotocol.io), by the package ``mcp``.

The servers are listed in a file in the usual form: ``{"mcpServers": {"NAME": {"command": ..., "args": [...], "env": {...}}}}`` for a
server that the run starts and speaks to over its standard streams, or ``{"url": ..., "headers": {...}}`` for one that listens (streamable
HTTP). ``"tools": ["a", "b"]`` selects some of a server's tools. ``${NAME}`` in a header or in ``env`` is an environment variable. All
samples share one connection per server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from miles_core.data import describe_error
from miles_core.plugin import ConfigError, DataError
from miles_tool_calls.functions import cut
from miles_tool_calls.outcome import Outcome, ToolFault
from miles_tool_calls.schema import check_schema

log = logging.getLogger(__name__)

FLAG = "--mcp-servers"
#: Seconds in which a server must start, and then list its tools.
CONNECT = 60.0
_KEYS = {"command", "args", "env", "cwd", "url", "headers", "tools", "type"}
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class _Problems(logging.Handler):
    """Receives what the package ``mcp`` logs: it writes a traceback for each line of a server that is not a message of the protocol. Here
    each becomes one line at the level debug, and the last one is part of the error if the server does not answer.

    Attributes:
        last: the last problem; empty if there was none since it was set so.
    """

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        details = getattr(error, "errors", None)  # of pydantic
        found = [f"{one.get('msg')}: {one.get('input')!r:.80}" for one in details()[:1]] if callable(details) else []
        what = found[0] if found else describe_error(error) if error else ""
        self.last = " ".join(f"{record.getMessage()} ({what})".removesuffix(" ()").split())[:400]
        log.debug("%s: %s", record.name, self.last)


_problems = _Problems(logging.WARNING)


def _collect_problems() -> None:
    """Route the log of the package to ``_problems``."""
    package = logging.getLogger("mcp")
    if _problems not in package.handlers:
        package.addHandler(_problems)
        package.propagate = False
    _problems.last = ""


def read_servers(path: Path) -> dict[str, dict[str, Any]]:
    """Read the file of servers: name -> entry.

    Raises:
        ConfigError: the file cannot be read or has another form, or an environment variable is not set.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG} {path}: cannot read it ({getattr(error, 'strerror', None) or error})") from None
    servers = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f'{FLAG} {path}: it must hold {{"mcpServers": {{"NAME": {{"command": ...}}}}}}')
    return {name: _check_entry(name, entry, path) for name, entry in servers.items()}


def _check_entry(name: str, entry: Any, path: Path) -> dict[str, Any]:
    where = f"{FLAG} {path}: the server {name!r}"
    if not isinstance(entry, dict) or ("command" in entry) == ("url" in entry):
        raise ConfigError(f'{where} needs either "command" (started by the run) or "url" (listening)')
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        raise ConfigError(f"{where} has the key {unknown[0]!r}; the keys are {', '.join(sorted(_KEYS))}")
    checks = {"args": list, "env": dict, "headers": dict, "tools": list, "command": str, "url": str}
    for key, kind in checks.items():
        if key in entry and not isinstance(entry[key], kind):
            raise ConfigError(
                f"{where}: {key} is {entry[key]!r:.80}; it must be a {'text' if kind is str else kind.__name__}"
            )
    filled = {
        key: {k: _fill(str(v), where) for k, v in entry[key].items()} for key in ("env", "headers") if key in entry
    }
    return {**entry, **filled}


def _fill(value: str, where: str) -> str:
    def variable(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigError(f"{where} uses the environment variable {found[1]}, which is not set")
        return os.environ[found[1]]

    return _VARIABLE.sub(variable, value)


class Server:
    """One connection to a server, opened and closed by a separate task.

    Attributes:
        schemas: tool name -> schema for the chat template; set by ``start``.
    """

    def __init__(self, name: str, entry: dict[str, Any]) -> None:
        self.name, self.entry = name, entry
        self.schemas: dict[str, dict[str, Any]] = {}
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        self._again = asyncio.Lock()

    async def start(self) -> None:
        """Connect and list the tools.

        Raises:
            ConfigError: the server does not start or list its tools, or describes a tool with a schema that cannot be used.
        """
        try:
            await self._connect()
        except ToolFault as error:
            raise ConfigError(f"{FLAG}: {error}") from error
        try:
            async with asyncio.timeout(CONNECT):
                listed = await self._list()
        except ConfigError:
            raise
        except Exception as error:  # the server's answer, or the transport's own errors
            why = f"no answer within {CONNECT:g} seconds" if isinstance(error, TimeoutError) else _innermost(error)
            raise ConfigError(
                f"{FLAG}: the MCP server {self.name} ({self._where}) did not list its tools: {why}; remove it if it has none"
            ) from error
        chosen = self.entry.get("tools")
        missing = [name for name in chosen or () if name not in listed]
        if missing:
            raise ConfigError(
                f"{FLAG}: the server {self.name} has no tool {missing[0]!r}; it has {', '.join(listed) or 'none'}"
            )
        self.schemas = {name: listed[name] for name in (chosen or listed)}

    async def _list(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            for tool in page.tools:
                parameters = check_schema(tool.input_schema, f"{FLAG}: the tool {tool.name} of the server {self.name}")
                function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
                found[tool.name] = {"type": "function", "function": function}
            cursor = page.next_cursor
            if not cursor:
                return found

    async def stop(self) -> None:
        """Close the connection; a server that the run started ends."""
        if self._task is not None:
            self._end.set()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task, self._client = None, None

    async def call(self, name: str, arguments: dict[str, Any], seconds: float, limit: int) -> Outcome:
        """Call a tool.

        Returns:
            the result, or the error that the server reports.

        Raises:
            ToolFault: the server is gone and cannot be connected to again.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            json.dumps(arguments, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return Outcome.error(f"wrong arguments: {error}")
        await self._ensure()
        try:
            async with asyncio.timeout(seconds):
                result = await self._client.call_tool(name, arguments)
        except TimeoutError:
            return Outcome.error(f"the call took longer than {seconds:g} seconds and was ended")
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                await self.stop()  # the next call connects again
            return Outcome.error(cut(str(error), limit))
        except Exception as error:  # the transport's own errors: the server has ended or closed the connection
            await self.stop()
            return Outcome.error(f"the server {self.name} did not answer ({describe_error(error)})")
        text = cut("\n".join(_text_of(block) for block in result.content), limit)
        if result.is_error:
            return Outcome(f"Error: {text}", failed=True)
        shown = any(getattr(block, "type", "") == "image" for block in result.content)
        return Outcome(text, parts=[_part_of(block) for block in result.content] if shown else None)

    async def _ensure(self) -> None:
        async with self._again:
            if self._task is None or self._task.done():
                log.warning("connecting to the MCP server %s again", self.name)
                await self._connect()

    async def _connect(self) -> None:
        _collect_problems()
        self._end = asyncio.Event()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(ready))
        try:
            async with asyncio.timeout(CONNECT):
                self._client = await ready
        except TimeoutError:
            self._task.cancel()
            why = f": {_problems.last}" if _problems.last else ""
            raise ToolFault(
                f"the MCP server {self.name} ({self._where}) did not answer within {CONNECT:g} seconds{why}"
            ) from None

    @property
    def _where(self) -> str:
        return str(self.entry.get("command") or self.entry.get("url"))

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        """Open the connection, keep it until ``stop``, and close it, all in one task, as the package requires."""
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._make(stack))
                ready.set_result(client)
                await self._end.wait()
        except BaseException as error:
            if ready.done():
                log.debug("the MCP server %s closed with %r", self.name, error)
                return
            ready.set_exception(
                ToolFault(f"the MCP server {self.name} ({self._where}) cannot be reached: {_innermost(error)}")
            )
            if not isinstance(error, Exception):  # the run was stopped; this is not an error of the server
                raise

    async def _make(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        entry = self.entry
        if "command" in entry:
            parameters = StdioServerParameters(
                command=entry["command"], args=entry.get("args", []), env=entry.get("env"), cwd=entry.get("cwd")
            )
            return Client(parameters)
        if not entry.get("headers"):
            return Client(entry["url"])
        from mcp.shared._httpx_utils import create_mcp_http_client

        http = await stack.enter_async_context(create_mcp_http_client(headers=entry["headers"]))
        return Client(streamable_http_client(entry["url"], http_client=http))


def _text_of(block: Any) -> str:
    """Return the text of a part of a result; other media are named."""
    text = getattr(block, "text", None)
    if isinstance(text, str):
        return text
    inner = getattr(getattr(block, "resource", None), "text", None)
    if isinstance(inner, str):
        return inner
    return f"[{getattr(block, 'type', 'something')} that cannot be shown as text]"


def _part_of(block: Any) -> dict[str, Any]:
    """Return a part of a result as a content part in OpenAI's form."""
    if getattr(block, "type", "") != "image":
        return {"type": "text", "text": _text_of(block)}
    kind = getattr(block, "mime_type", None) or getattr(block, "mimeType", None) or "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{block.data}"}}


def _innermost(error: BaseException) -> str:
    """Return the first error in a group of errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, DataError):
        return str(error)
    return describe_error(error).splitlines()[0].rstrip(": ")
