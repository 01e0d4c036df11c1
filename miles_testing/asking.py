"""Send requests to an engine in a test and collect the responses."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from miles_core.contracts.engine import Engine, Request, Response, Sampling


def start(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, first_key: int = 0, extras: set[str] | None = None
) -> list[asyncio.Future[Response]]:
    """Start requests with consecutive keys from ``first_key``; returns their futures."""
    return [
        asyncio.ensure_future(engine.generate(Request(list(p), sampling, key=first_key + i, extras=set(extras or ()))))
        for i, p in enumerate(prompts)
    ]


async def start_and_wait(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, extras: set[str] | None = None
) -> list[asyncio.Future[Response]]:
    """Start requests and wait until the first of them have run a few steps, that is, until a short request in the same batch is done."""
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
    """Generate responses and wait for all of them."""

    async def main() -> list[Response]:
        return await asyncio.gather(*start(engine, prompts, sampling, first_key, extras))

    return runner.run(main())
