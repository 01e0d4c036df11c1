"""The requests that an engine in this process has received from one client, see ``mailbox``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from miles_core.contracts.engine import Request, Response
from miles_workers.workers import portable

#: Messages by ticket, a number that the ``Mailbox`` assigns: requests, and responses or the errors raised instead.
Letters = dict[int, Request]
Answers = dict[int, tuple[Response | None, Exception | None]]


class Inbox:
    """Engine side of the request queue.

    Args:
        generate: generates the response to one request.
    """

    def __init__(self, generate: Callable[[Request], Awaitable[Response]]) -> None:
        self._generate = generate
        self._tasks: dict[asyncio.Task[None], int] = {}  # with the keys of their requests
        self._answers: Answers = {}
        self._answered = asyncio.Event()

    def post(self, letters: Letters) -> None:
        """Start generating responses to these requests."""
        for ticket, request in letters.items():
            task = asyncio.create_task(self._answer(ticket, request))
            self._tasks[task] = request.key
            task.add_done_callback(self._tasks.pop)

    def close(self) -> list[int]:
        """Drop all requests, whose client has ended; return their keys, which the engine must abort."""
        keys = [*self._tasks.values()]
        for task in self._tasks:
            task.cancel()
        self._answers = {}
        self._answered.set()
        return keys

    async def answers(self) -> Answers:
        """Wait until a request is complete; return all complete responses. Only one call may be active."""
        await self._answered.wait()
        await asyncio.sleep(0)  # include requests that complete in the same event-loop iteration
        self._answered.clear()
        found, self._answers = self._answers, {}
        return found

    async def _answer(self, ticket: int, request: Request) -> None:
        try:
            self._answers[ticket] = await self._generate(request), None
        except Exception as error:
            self._answers[ticket] = None, portable(error)
        self._answered.set()
