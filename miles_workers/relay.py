"""Combines calls of many senders to many engines, so that messages grow with senders plus engines and not with their product.

Every rank that has weights calls every engine for each of its blocks. With 1,024 senders and 256 engines these are 262,144 calls per block.
With a relay each sender makes one call, to the worker of the first engine. It collects the calls of the same method that arrive within
``WINDOW`` seconds, or those of all senders, and makes one call with all of them to each engine: 1,024 + 256. Buckets pass as references of
the runtime (``Workers.share``), so their bytes go from sender to engine directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_core.errors import SyncError
from miles_workers.timeouts import ignore_error
from miles_workers.workers import Workers

#: Senders times engines from which calls pass through the relay; below, direct calls are as few and take one hop less.
RELAYED = 64
#: Seconds to wait for the calls of further senders.
WINDOW = 0.01

#: A method of ``EngineWorker`` and its arguments.
Call = tuple[str, tuple[Any, ...]]


def is_relayed(senders: int, engines: int) -> bool:
    """Return whether calls pass through the relay, given the numbers of senders and engines."""
    return senders * engines >= RELAYED and min(senders, engines) > 1


@dataclass
class _Batch:
    """Calls of one method that wait to be sent together.

    Attributes:
        calls: the calls; their last arguments are in ``shared``.
        shared: for each call, its last argument as a value of ``Workers.share``, or nothing.
        answers: one future per call.
    """

    calls: list[Call] = field(default_factory=list)
    shared: list[Sequence[Any]] = field(default_factory=list)
    answers: list[asyncio.Future[None]] = field(default_factory=list)


class Relay:
    """Receives the senders' calls of one push and sends them to all engines.

    Args:
        engines: handle to the engine workers.
        push: number of the push.
        deliver: the method of the engine workers that receives a batch, ``EngineWorker.deliver``.
    """

    def __init__(self, engines: Workers, push: int, deliver: Callable[..., Any]) -> None:
        self.engines, self.push, self.deliver = engines, push, deliver
        self._waiting: dict[str, _Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def call(self, senders: int, method: str, args: tuple[Any, ...], shared: Sequence[Any] = ()) -> None:
        """Call ``method(push, *args, *shared)`` on all engines; return when all have answered.

        Args:
            senders: number of senders; when all of them have called, the batch is sent at once.
            method, args: the call.
            shared: at most one argument that ``Workers.share`` returned.

        Raises:
            SyncError: the push was given up.
            Exception: the first error of an engine.
        """
        if self._closed:
            raise SyncError(f"push {self.push} of the weights was given up")
        if method not in self._waiting:
            self._waiting[method] = _Batch()
            self._start(self._send_later(method, self._waiting[method]))
        batch = self._waiting[method]
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(ignore_error)
        batch.calls.append((method, args))
        batch.shared.append(shared)
        batch.answers.append(answer)
        if len(batch.calls) >= senders:
            self._start(self._send(method, batch))
        await answer

    def close(self) -> None:
        """Give up the push: pending and later calls fail with SyncError."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for batch in self._waiting.values():
            _fail(batch, SyncError(f"push {self.push} of the weights was given up"))
        self._waiting = {}

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_later(self, method: str, batch: _Batch) -> None:
        await asyncio.sleep(WINDOW)
        await self._send(method, batch)

    async def _send(self, method: str, batch: _Batch) -> None:
        if self._waiting.get(method) is not batch:
            return  # it was sent because all senders had called
        del self._waiting[method]
        shared = [value for values in batch.shared for value in values]
        sizes = [len(values) for values in batch.shared]
        try:
            found = await asyncio.gather(
                *(
                    self.engines.call(n, self.deliver, self.push, batch.calls, sizes, *shared)
                    for n in range(len(self.engines))
                )
            )
        except asyncio.CancelledError:
            _fail(batch, SyncError(f"push {self.push} of the weights was given up"))
            raise
        except Exception as error:  # e.g. an engine was lost: every sender raises this error
            _fail(batch, error)
            return
        for answer, errors in zip(batch.answers, zip(*found, strict=True), strict=True):
            first = next((e for e in errors if e is not None), None)
            if answer.done():
                continue
            if first is None:
                answer.set_result(None)
            else:
                answer.set_exception(first)


def _fail(batch: _Batch, error: Exception) -> None:
    for answer in batch.answers:
        if not answer.done():
            answer.set_exception(error)
