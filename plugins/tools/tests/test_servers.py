"""MCP servers: the file that lists them, and real servers over standard streams and HTTP (where the package ``mcp`` is installed)."""

import asyncio
import http.server
import json
import logging
import socket
import subprocess
import sys
import threading
import time

import pytest

from miles_core.data import Sample
from miles_core.plugin import ConfigError
from miles_tool_calls import servers
from miles_tool_calls.config import ToolsConfig
from miles_tool_calls.servers import read_servers
from miles_tool_calls.toolbox import Toolbox

SERVER = """
import asyncio, os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("demo")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("no")

@server.tool()
async def wait() -> str:
    "Wait."
    await asyncio.sleep(30)

@server.tool()
def end() -> str:
    "End the server."
    os._exit(1)

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read it"),
        ("{}", 'it must hold {"mcpServers"'),
        ('{"mcpServers": {"a": {}}}', "the server 'a' needs either"),
        ('{"mcpServers": {"a": {"command": "x", "url": "y"}}}', "the server 'a' needs either"),
        ('{"mcpServers": {"a": {"command": "x", "arguments": []}}}', "has the key 'arguments'; the keys are args, command"),
        ('{"mcpServers": {"a": {"command": "x", "args": "y"}}}', "args is 'y'; it must be a list"),
        ('{"mcpServers": {"a": {"url": "x", "headers": {"A": "${NOT_SET_HERE}"}}}}', "the environment variable NOT_SET_HERE, which is not"),
    ],
)  # fmt: skip
def test_files_that_are_refused(tmp_path, text, message):
    (tmp_path / "mcp.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_servers(tmp_path / "mcp.json")
    assert message in str(error.value)


def test_variables_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.setenv("THE_TOKEN", "secret")
    entry = {"url": "http://x", "headers": {"Authorization": "Bearer ${THE_TOKEN}"}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"a": entry}}))
    assert read_servers(tmp_path / "mcp.json")["a"]["headers"] == {"Authorization": "Bearer secret"}


@pytest.fixture
def box(tmp_path):
    """``box(**entry)``: a toolbox with one server; by default the test's server over standard streams."""
    pytest.importorskip("mcp", reason='no MCP client is installed: pip install "mcp>=2,<3"')
    (tmp_path / "server.py").write_text(SERVER)

    def make(**entry):
        entry = entry or {
            "command": sys.executable,
            "args": [str(tmp_path / "server.py")],
            "env": {"PYTHONPATH": ":".join(sys.path)},
        }
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"demo": entry}}))
        return Toolbox(ToolsConfig(mcp_servers=tmp_path / "mcp.json"))

    return make


async def call_all(box, *calls):
    await box.start()
    try:
        async with box.open(Sample()) as session:
            return [await session.call(name, arguments, seconds, 40) for name, arguments, seconds in calls]
    finally:
        await box.stop()


def test_a_server_over_standard_streams(box):
    made = box()
    results = asyncio.run(
        call_all(
            made,
            ("add", {"a": 1, "b": 2}, 20),
            ("fail", {}, 20),
            ("wait", {}, 0.2),
            ("add", {"a": "x"}, 20),
            ("end", {}, 5),
            ("add", {"a": 3, "b": 4}, 20),  # the server is started again
        )
    )
    assert [r.failed for r in results] == [False, True, True, True, True, False]
    assert results[0].text == "3" and results[-1].text == "7" and "longer than 0.2 seconds" in results[2].text
    assert made.servers[0]._task is None


WITHOUT_TOOLS = """
import json, sys

for line in sys.stdin:
    message = json.loads(line)
    reply = {"jsonrpc": "2.0", "id": message.get("id")}
    if message.get("method") == "initialize":
        about = {"capabilities": {}, "serverInfo": {"name": "prompts", "version": "1"}}
        print(json.dumps(reply | {"result": about | {"protocolVersion": message["params"]["protocolVersion"]}}), flush=True)
    elif "id" in message and not (message["method"] == "tools/list" and "silent" in sys.argv):
        print(json.dumps(reply | {"error": {"code": -32601, "message": "Method not found"}}), flush=True)
"""


@pytest.mark.parametrize(("mode", "why"), [("error", "Method not found"), ("silent", "no answer within 5 seconds")])
def test_a_server_that_does_not_list_its_tools(box, tmp_path, monkeypatch, mode, why):
    monkeypatch.setattr(servers, "CONNECT", 5.0)
    (tmp_path / "prompts.py").write_text(WITHOUT_TOOLS)
    made = box(command=sys.executable, args=[str(tmp_path / "prompts.py"), mode])

    async def start():
        try:
            async with asyncio.timeout(20):
                await made.start()
        finally:
            await made.stop()

    with pytest.raises(ConfigError, match=rf"the MCP server demo \(.*\) did not list its tools: .*{why}"):
        asyncio.run(start())


def test_a_server_over_http(box, tmp_path):
    made = box()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "server.py"), str(port)], env={"PYTHONPATH": ":".join(sys.path)}
    )
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        for headers in ({}, {"headers": {"X-Token": "a"}}):
            made = box(url=f"http://127.0.0.1:{port}/mcp", tools=["add"], **headers)
            assert [r.text for r in asyncio.run(call_all(made, ("add", {"a": 1, "b": 2}, 20)))] == ["3"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"command": "no-such-program"}, "the MCP server demo .no-such-program. cannot be reached"),
        ({"url": "http://127.0.0.1:9/mcp"}, "the MCP server demo .http://127.0.0.1:9/mcp. cannot be reached"),
    ],
)
def test_servers_that_cannot_be_reached(box, entry, message):
    with pytest.raises(ConfigError, match=message):
        asyncio.run(call_all(box(**entry)))


@pytest.fixture
def logged():
    """The records that reach the run's log."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('Listening on port 3', flush=True); time.sleep(60)", "Invalid JSON: .*'Listening on port 3"),
        ("sys.stdin.readline(); print('[1]', flush=True); time.sleep(60)", "Failed to parse"),
        ("sys.stdout.buffer.write(bytes([255, 254, 0, 10])); sys.stdout.flush(); time.sleep(60)", "did not answer"),
        ("time.sleep(60)", "did not answer within 2 seconds$"),
    ],
)
def test_servers_that_print_no_json_are_one_sentence(box, monkeypatch, logged, code, words):
    monkeypatch.setattr(servers, "CONNECT", 2.0)
    with pytest.raises(ConfigError, match=rf"--mcp-servers: the MCP server demo \(.*{words}") as caught:
        asyncio.run(call_all(box(command=sys.executable, args=["-c", f"import sys, time; {code}"])))
    assert "\n" not in str(caught.value) and not [record for record in logged if record.exc_info]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", b"<html>"),
        ("application/json", b"{nope"),
        ("application/json", b"[1]"),
        ("text/event-stream", b"data: x\n\n"),
    ],
)
def test_addresses_that_are_no_mcp_servers_are_one_sentence(box, logged, kind, body):
    class Page(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *rest):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError, match=r"the MCP server demo .* cannot be reached: ") as caught:
            asyncio.run(call_all(box(url=f"http://127.0.0.1:{page.server_port}/mcp")))
        page.shutdown()
    assert "\n" not in str(caught.value) and not [record for record in logged if record.exc_info]
