"""Calls of a server of an engine's program."""

import asyncio

import pytest

from miles_tools.engine_server import EngineServer
from miles_workers.servers import NotReachable, ServerError


class Link(EngineServer):
    program, flag = "Mine", "--mine-url"

    async def start(self):
        self.open()
        return await self.wait_for(lambda timeout: self.ask("version", None, timeout))

    async def version(self, timeout):
        return ""

    async def abort(self, rid):
        return None


def test_a_call_that_cannot_be_sent_is_not_repeated(monkeypatch):
    monkeypatch.setattr(Link, "headers", lambda self: {"Authorization": "one\ntwo"})
    with pytest.raises(ServerError, match=r"^--mine-url http://127\.0\.0\.1:9: version: .*cannot be sent") as caught:
        asyncio.run(Link("http://127.0.0.1:9", 20.0).start())
    assert not isinstance(caught.value, NotReachable)


def test_a_server_that_does_not_answer_is_waited_for():
    with pytest.raises(NotReachable, match="no Mine server answers there"):
        asyncio.run(Link("http://127.0.0.1:9", 0.1).start())
