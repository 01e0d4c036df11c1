"""The queue of requests, scheduled round-robin over clients. A request that was sent twice runs once.

Requests run in one thread, which owns the models; HTTP is served in another, so that a client's heartbeat never waits for a training step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from miles_core.plugin import MilesError
from miles_tools.http_server import ApiError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A request that a client waits for.

    Attributes:
        id: the id under which the client asks for the result.
        client: the client's session.
        work: computes the result: bytes of a protocol-buffer message, or JSON data.
        alone: whether it trains or changes models, and so runs alone; requests of samplers run together.
        digest: identifies the request's content.
        result: completes with the result; its exception is a MilesError or an ApiError for a mistake of the client.
    """

    id: str
    client: str
    work: Callable[[], Awaitable[Any]]
    alone: bool
    digest: bytes
    result: Future[Any] = field(default_factory=Future)

    async def run(self) -> None:
        """Compute the result."""
        try:
            self.result.set_result(await self.work())
        except asyncio.CancelledError:
            self.result.set_exception(MilesError("the server stopped"))
            raise
        except Exception as error:
            if not isinstance(error, MilesError | ApiError):
                log.exception("the request %s failed", self.id)
            self.result.set_exception(error)

    async def wait(self, seconds: float, stopping: asyncio.Event) -> None:
        """Wait until the result is there.

        Raises:
            ApiError: status 408 after ``seconds``, 503 after ``stopping``.
        """
        complete = asyncio.shield(asyncio.wrap_future(self.result))
        stopped = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({complete, stopped}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not complete.cancel():
            complete.exception()  # ``result`` raises it
        elif stopping.is_set():
            raise ApiError(503, "the server stops", "stopping")
        else:
            raise ApiError(408, "the request is not complete yet", "try_again")


class FairQueue:
    """Runs jobs: one of each client in turn, in the order in which the client sent them.

    Args:
        most: number of jobs of samplers that run together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def put(self, job: Job) -> None:
        """Add a job. Call it in the queue's event loop."""
        self._waiting.setdefault(job.client, deque()).append(job)
        self._changed.set()

    async def run(self) -> None:
        """Run jobs until cancelled."""
        try:
            while True:
                job = self._next()
                if job is None:
                    self._changed.clear()
                    await self._changed.wait()
                elif job.alone:
                    await self._run_alone(job)
                else:
                    task = asyncio.ensure_future(job.run())
                    self._running.add(task)
                    task.add_done_callback(self._finish)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _next(self) -> Job | None:
        """Take the next job that can run, of the client that has waited longest for its turn."""
        full = len(self._running) >= self.most
        for client, jobs in self._waiting.items():
            if jobs[0].alone or not full:
                job = jobs.popleft()
                self._waiting.move_to_end(client)
                if not jobs:
                    del self._waiting[client]
                return job
        return None

    async def _run_alone(self, job: Job) -> None:
        started = time.monotonic()
        await job.run()
        await asyncio.sleep(0)
        if self._running:  # samplers do not advance meanwhile: give them as much time
            await asyncio.wait(self._running, timeout=time.monotonic() - started)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._changed.set()
