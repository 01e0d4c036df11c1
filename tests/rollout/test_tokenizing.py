"""Long texts are tokenized in threads, for a limited time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from miles_core.plugin import DataError
from miles_core.rollout import tokenizing
from miles_core.rollout.tokenizing import tokenize

LONG = "x" * tokenizing.LONG


def test_short_texts_stay_and_long_ones_go_to_a_thread():
    async def main():
        here = await tokenize(threading.get_ident, [{"role": "user", "content": "short"}])
        there = await tokenize(threading.get_ident, [{"role": "user", "content": LONG}])
        return here, there

    here, there = asyncio.run(main())
    assert here == threading.get_ident() != there


def test_the_event_loop_goes_on_meanwhile():
    async def main():
        turns = 0
        work = asyncio.ensure_future(tokenize(lambda: time.sleep(0.3), LONG))
        while not work.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns

    assert asyncio.run(main()) > 5


def test_time_is_limited_and_errors_are_raised(monkeypatch):
    monkeypatch.setattr(tokenizing, "SECONDS", 0.05)
    release = threading.Event()

    async def main():
        with pytest.raises(DataError, match=r"tokenizing 16,384 characters takes longer than 0.05 seconds"):
            await tokenize(lambda: release.wait(20), LONG)
        release.set()
        with pytest.raises(ZeroDivisionError):
            await tokenize(lambda: 1 // 0, LONG)

    asyncio.run(main())
