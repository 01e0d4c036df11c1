"""Sending requests to an engine in a test and waiting for what comes back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from miles_core.contracts.engine import Engine, Request, Response, Sampling


def start(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, first_key: int = 0, extras: set[str] | None = None
) -> list[asyncio.Task[Response]]:
    """Put requests in flight; keys count up from ``first_key``."""
    loop = asyncio.get_running_loop()
    return [
        loop.create_task(engine.generate(Request(list(p), sampling, key=first_key + i, extras=set(extras or ()))))
        for i, p in enumerate(prompts)
    ]


async def under_way(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, extras: set[str] | None = None
) -> list[asyncio.Task[Response]]:
    """Put requests in flight and wait until the first of them have made a few steps: until a short one that shares
    their batch is done."""
    short = start(engine, [[9]], replace(sampling, max_new_tokens=5), first_key=999, extras=extras)
    tasks = start(engine, prompts, sampling, extras=extras)
    await short[0]
    return tasks


def ask(
    runner: asyncio.Runner,
    engine: Engine,
    prompts: list[list[int]],
    sampling: Sampling,
    first_key: int = 0,
    extras: set[str] | None = None,
) -> list[Response]:
    """Generate and wait."""

    async def main() -> list[Response]:
        return await asyncio.gather(*start(engine, prompts, sampling, first_key, extras))

    return runner.run(main())
