"""Renders and tokenizes conversations without blocking the event loop. A text of a few megabytes takes seconds, during which no other
sample would advance. Long texts are therefore tokenized in threads, a few at a
time, and for a limited time. (Tokenizers release the interpreter's lock while they work.)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from miles_core.errors import DataError
from miles_core.rollout.user_code import call_in_thread
from miles_core.text import count_characters

T = TypeVar("T")

#: Characters from which a text is tokenized in a thread; starting one takes as long as tokenizing a few hundred.
LONG = 16_384
#: Seconds that a text may take, waiting for a thread included.
SECONDS = 60.0
_turns = threading.Semaphore(2)


async def tokenize(function: Callable[[], T], text: Any) -> T:
    """Call a function that renders and tokenizes.

    Args:
        function: such as ``lambda: renderer.render(messages)``.
        text: its text or messages, whose length decides where it is called.

    Raises:
        DataError: it takes longer than ``SECONDS``.
    """
    characters = count_characters(text)
    if characters < LONG:
        return function()
    given_up = threading.Event()

    def in_turn() -> T:
        with _turns:
            if given_up.is_set():
                raise TimeoutError
            return function()

    limit = asyncio.timeout(SECONDS)
    try:
        async with limit:
            return await call_in_thread(in_turn, "tokenize")
    except TimeoutError:
        if not limit.expired():
            raise
        raise DataError(f"tokenizing {characters:,} characters takes longer than {SECONDS:g} seconds") from None
    finally:
        given_up.set()
