"""Batches requests to an engine in another process, and its responses.

A call between processes takes milliseconds regardless of its size, and a step has hundreds of requests. Requests made at the same
time are therefore sent in one call, and one long-polling call returns all responses completed since the last.
"""

from __future__ import annotations

import asyncio
import itertools

from miles_core.contracts.engine import Request, Response
from miles_workers.engine_worker import EngineWorker
from miles_workers.inbox import Answers, Letters
from miles_workers.workers import Workers


class Mailbox:
    """Driver side of one engine's request queue.

    Args:
        engines: handle to the engine workers.
        number: index of this engine.
        client: distinguishes the processes with requests to the same engine (``EngineWorker.post``); "" is the driver.
    """

    def __init__(self, engines: Workers, number: int, client: str = "") -> None:
        self._engines, self._number, self._client = engines, number, client
        self._tickets = itertools.count()
        self._outgoing: Letters = {}
        self._open: dict[int, asyncio.Future[Response]] = {}
        self._posts: set[asyncio.Task[None]] = set()
        self._collecting: asyncio.Task[None] | None = None

    async def ask(self, request: Request) -> Response:
        """Send a request and return the response. Raises the engine's error, or WorkerLost as ``Workers.await_result`` does."""
        ticket = next(self._tickets)
        if not self._outgoing:
            post = asyncio.create_task(self._post())  # runs after all requests of this event-loop iteration were added
            self._posts.add(post)
            post.add_done_callback(self._posts.discard)
        self._outgoing[ticket] = request
        answer = self._open[ticket] = asyncio.get_running_loop().create_future()
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect())
        try:
            with self._engines.name_errors(self._number), self._engines.busy.at(self._engines.names[self._number]):
                response: Response = await answer
            return response
        finally:
            self._open.pop(ticket, None)
            self._outgoing.pop(ticket, None)

    def close(self, error: Exception) -> None:
        """Fail all pending requests with ``error``. Later requests go to the engine's replacement."""
        for task in (*self._posts, *([self._collecting] if self._collecting else ())):
            task.cancel()
        self._outgoing, self._collecting = {}, None
        self._fail(list(self._open), error)

    async def _post(self) -> None:
        letters, self._outgoing = self._outgoing, {}
        try:
            if letters:
                sent = self._engines.send(self._number, EngineWorker.post.__name__, self._client, letters)
                await self._engines.await_result(self._number, sent, "generate")
        except Exception as error:
            self._fail(list(letters), error)

    async def _collect(self) -> None:
        try:
            # the timeout restarts with each response: an engine that responds is not lost, however long its queue
            while self._open:
                coming = self._engines.send(self._number, EngineWorker.answers.__name__, self._client)
                answers: Answers = await self._engines.await_result(self._number, coming, "generate")
                for ticket, (response, error) in answers.items():
                    if response is None:
                        self._fail([ticket], error or RuntimeError("an answer without a response"))
                    elif (answer := self._open.pop(ticket, None)) is not None and not answer.done():
                        answer.set_result(response)
        except Exception as error:
            self._fail(list(self._open), error)

    def _fail(self, tickets: list[int], error: Exception) -> None:
        for ticket in tickets:
            answer = self._open.pop(ticket, None)
            if answer is not None and not answer.done():
                answer.set_exception(error)
