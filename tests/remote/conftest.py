"""Workers that only write down what they are asked."""

from __future__ import annotations

import asyncio

import pytest

from miles_core.remote.workers import Workers

SAID = {"capabilities": frozenset({"score"}), "kv_cache_dtype": "", "native_products": False, "model_facts": {"a": 1}}


class Recorded(Workers):
    """``answers[method]`` is called with (number, *args) or returned; what ``dead`` numbers are asked is lost."""

    def __init__(self, names, answers=None, **options):
        super().__init__(names, **options)
        self.answers, self.calls, self.dead = answers or {}, [], set()

    async def send(self, number, method, *args):
        if method == "at":  # how ranks are told the step
            _, method, *args = args
        self.calls.append((number, method, *args))
        await asyncio.sleep(0)
        if number in self.dead:
            raise self.lost(number, "it was killed")
        answer = self.answers.get(method)
        result = answer(number, *args) if callable(answer) else answer
        return await result if asyncio.iscoroutine(result) else result

    async def renew(self, number):
        self.dead.discard(number)

    async def end(self):
        pass

    def asked(self, method):
        return [call for call in self.calls if call[1] == method]


@pytest.fixture
def said():
    return dict(SAID)


@pytest.fixture
def recorded():
    return Recorded
