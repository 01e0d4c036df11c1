"""A desk: one session with a scripted engine."""

from __future__ import annotations

import asyncio

import pytest

from miles_endpoint.testing import Desk


@pytest.fixture
def desk():
    """``desk(script, main, ...)``: run ``await main(desk)`` with a new ``Desk`` and return it."""

    def run(script, main, **options):
        made = Desk(script, **options)
        asyncio.run(main(made))
        return made

    return run
