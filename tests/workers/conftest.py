"""Workers that only write down what they are asked."""

from __future__ import annotations

import asyncio

import pytest

from miles_workers.inbox import Inbox
from miles_workers.remote_tokens import pack_tokens
from miles_workers.workers import Workers

BUILD_INFO = {
    "capabilities": frozenset({"score"}),
    "kv_cache_dtype": "",
    "native_products": False,
    "model_facts": {"a": 1},
}


class Recorded(Workers):
    """``answers[method]`` is called with (number, *args) or returned; what ``dead`` numbers are asked is lost.

    ``answers["generate"]`` answers requests, which come by post."""

    def __init__(self, names, answers=None, **options):
        super().__init__(names, **options)
        self.answers, self.calls, self.dead, self.hung = answers or {}, [], set(), set()
        self.inboxes, self.clocks = {}, {}

    async def send(self, number, method, *args):
        if method == "at":  # how ranks learn the step; they answer with the seconds of their clocks
            _, method, *args = args
            return await self.send(number, method, *args), self.clocks.get(number, {})
        if method == "learn_stored":  # the same for what stays in the rank
            (pairs, seen), seconds = await self.send(number, "at", args[0], "learn", *args[1:])
            return ((pairs, len(seen)), seconds), [pack_tokens(seen)]
        self.calls.append((number, method, *args))
        await asyncio.sleep(0)
        if number in self.dead:
            raise self.lost_error(number, "it was killed")
        if method in ("post", "answers"):
            client, *args = args
            answer = Inbox(lambda request: self._respond("generate", number, request))
            inbox = self.inboxes.setdefault((number, client), answer)
            result = getattr(inbox, method)(*args)
            return await result if asyncio.iscoroutine(result) else result
        return await self._respond(method, number, *args)

    async def _respond(self, method, number, *args):
        answer = self.answers.get(method)
        result = answer(number, *args) if callable(answer) else answer
        return await result if asyncio.iscoroutine(result) else result

    async def restart(self, number):
        self.dead.discard(number)
        self.inboxes = {place: inbox for place, inbox in self.inboxes.items() if place[0] != number}

    async def kill(self, number):
        self.dead.add(number)

    async def beat(self, number):
        if number in self.hung:
            await asyncio.Event().wait()
        return ()

    def asked(self, method):
        return [call for call in self.calls if call[1] == method]


@pytest.fixture
def build_info():
    return dict(BUILD_INFO)


@pytest.fixture
def recorded():
    return Recorded
