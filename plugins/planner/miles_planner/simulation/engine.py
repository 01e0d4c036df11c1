"""A virtual engine: continuous batching with a limit on requests and on cached tokens, one event per change of the batch.

Between two events the batch is constant and every request in it gains one token per step. With b requests and C tokens of context, n
steps take n (base(b) + c C) + c b n (n - 1) / 2 seconds, because the context grows by b each step; the sum is treated as continuous in n.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count

from miles_core.contracts.engine import PauseMode, Request, Response
from miles_planner.simulation.ledger import Ledger
from miles_planner.simulation.speed import Speed

#: Steps within which a response counts as finished; virtual time is a float.
_EPSILON = 1e-3


@dataclass(eq=False)
class Flight:
    """A request of an engine.

    Attributes:
        request: the request.
        before: tokens of the response that the driver has or had when it sent the request.
        total: tokens of the complete response.
        prompt: tokens of the prompt.
        answer: the response, when it is complete or aborted.
        done: tokens of the response up to the time when the request last joined or left the batch.
        joined: the engine's step at which it joined the batch; None while it waits.
        versions: first token of each weight version, counted from ``before`` in units.
    """

    request: Request
    before: int
    total: int
    prompt: int
    done: float
    answer: asyncio.Future[Response]
    joined: float | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)


class VirtualEngine:
    """One engine.

    Args:
        speed: cost model of decoding and prefill.
        ledger: shared by all engines.
        slots: maximum batch size.

    Attributes:
        version: version of the weights.
        busy: seconds in which it computed.
        occupied: integral of the batch size over the seconds in which it decoded.
    """

    def __init__(self, speed: Speed, ledger: Ledger, slots: int) -> None:
        self.speed, self.ledger, self.slots = speed, ledger, slots
        self.version = -1
        self.busy = self.occupied = 0.0
        self.paused = False
        self.flights: dict[int, Flight] = {}
        self._batch: dict[int, Flight] = {}
        self._queue: deque[Flight] = deque()
        self._ends: list[tuple[float, int, Flight]] = []
        self._prompts: set[int] = set()  # groups whose prompt is cached
        self._context = self._steps = self._clock = 0.0
        self._numbers = count()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._settling = False

    async def generate(self, request: Request) -> Response:
        """Decode one request."""
        ledger = self.ledger
        total = ledger.response(request.key)
        before = ledger.units(ledger.lengths.longest) - request.sampling.max_new_tokens
        done = ledger.start(request.key, before)
        prompt = ledger.lengths.prompt(request.group)
        flight = Flight(request, before, total, prompt, done, self._loop.create_future())
        self.flights[request.key] = flight
        self._queue.append(flight)
        self._settle_soon()
        return await flight.answer

    def pause(self, mode: PauseMode) -> None:
        """Stop decoding; ``abort`` returns all requests, ``retract`` drops their cache."""
        self._advance()
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for flight in reversed(self._batch.copy().values()):
                self._leave(flight)
                self._queue.appendleft(flight)
            self._prompts.clear()
        self._settle_soon()

    def resume(self) -> None:
        """Continue after ``pause``."""
        self._advance()
        self.paused = False
        self._settle_soon()

    def install(self, version: int) -> None:
        """Serve weights of this version; keys and values of prompts belong to the old ones."""
        self.version = version
        self._prompts.clear()
        for flight in self._batch.values():
            self._mark_version(flight)

    def abort(self, keys: Collection[int] | None) -> None:
        """Return the partial responses of these requests, None for all."""
        self._advance()
        if keys is not None and len(keys) < len(self.flights):  # the usual case, without a pass over all requests
            found = [key for key in keys if key in self.flights]
        else:
            wanted = None if keys is None else set(keys)
            found = [key for key in self.flights if wanted is None or key in wanted]
        for key in found:
            self._return(self.flights[key])
        self._queue = deque(flight for flight in self._queue if not flight.answer.done())
        self._settle_soon()

    def stop(self) -> None:
        """Stop computing: the engine failed or the run ended. Its requests get no answer."""
        self._advance()
        for flight in self.flights.values():
            self._leave(flight)
            flight.answer.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.flights, self._queue, self.paused = {}, deque(), True

    def _settle_soon(self) -> None:
        """Settle once after all calls of this iteration of the event loop."""
        if not self._settling:
            self._settling = True
            self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        """Bring the engine to the present, complete and admit requests, and set the timer for the next change."""
        self._settling = False
        self._advance()
        while self._ends and (self._ends[0][2].joined is None or self._ends[0][0] <= self._steps + _EPSILON):
            flight = heapq.heappop(self._ends)[2]
            if (
                flight.joined is not None
                and self._batch.get(flight.request.key) is flight
                and self._rest(flight) <= _EPSILON
            ):
                self._return(flight)
        # as SGLang: the youngest request gives way. The tolerance ends waits that are shorter than the clock's resolution
        while len(self._batch) > 1 and self._context >= self.speed.cache - _EPSILON * len(self._batch):
            youngest = next(reversed(self._batch.values()))
            self._leave(youngest)
            self._queue.appendleft(youngest)
        self._admit()
        self._set_timer()

    def _rest(self, flight: Flight) -> float:
        """Return the number of tokens that a request of the batch still has to decode."""
        return flight.total - flight.done - (self._steps - (flight.joined or 0.0))

    def _admit(self) -> None:
        """Move waiting requests into the batch while slots and cache allow it. Decoding waits while their prompts are computed."""
        while self._queue and not self.paused and len(self._batch) < self.slots:
            flight = self._queue[0]
            context = flight.prompt + flight.done
            next_step = len(self._batch) + 1  # every request gains one token
            if self._batch and self._context + context + next_step >= self.speed.cache:
                return
            self._queue.popleft()
            group = flight.request.group
            new = flight.done + (0 if group in self._prompts else flight.prompt)
            self._prompts.add(group)
            seconds = new * self.speed.prefill
            self._clock += seconds
            self.busy += seconds
            self._batch[flight.request.key] = flight
            self._context += context
            flight.joined = self._steps
            heapq.heappush(self._ends, (self._steps + flight.total - flight.done, next(self._numbers), flight))
            self._mark_version(flight)
            self.ledger.count(self._loop.time(), 1)

    def _advance(self) -> None:
        """Account for the steps since the last event."""
        now, batch = self._loop.time(), len(self._batch)
        elapsed = now - self._clock
        if elapsed <= 0:
            return  # still computing prompts
        self._clock = now
        if not batch or self.paused:
            return
        steps = self._steps_in(elapsed, batch)
        self._steps += steps
        self._context += steps * batch
        self.ledger.generated += steps * batch
        self.busy += elapsed
        self.occupied += elapsed * batch

    def _steps_in(self, seconds: float, batch: int) -> float:
        """Solve ``_seconds_of(n) = seconds`` for n."""
        linear, square = self._coefficients(batch)
        if square * seconds < 1e-12 * linear * linear:
            return seconds / linear
        return 2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds))

    def _seconds_of(self, steps: float, batch: int) -> float:
        linear, square = self._coefficients(batch)
        return steps * (linear + square * steps)

    def _coefficients(self, batch: int) -> tuple[float, float]:
        decode = self.speed.decode
        return decode.base(batch) + decode.per_token * self._context, decode.per_token * batch / 2

    def _set_timer(self) -> None:
        """Set the timer for the next change: the first request ends, or the cache is full."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = len(self._batch)
        if not batch or self.paused:
            return
        while self._ends[0][2].joined is None or self._batch.get(self._ends[0][2].request.key) is not self._ends[0][2]:
            heapq.heappop(self._ends)
        steps = max(self._ends[0][0] - self._steps, 0.0)
        if batch > 1:
            steps = min(steps, max((self.speed.cache - self._context) / batch, 0.0))
        self._timer = self._loop.call_at(self._clock + self._seconds_of(steps, batch), self._settle)

    def _leave(self, flight: Flight) -> None:
        """Take a request out of the batch and record its progress."""
        if flight.joined is None:
            return
        del self._batch[flight.request.key]
        self._context -= flight.prompt + flight.done + (self._steps - flight.joined)
        flight.done += self._steps - flight.joined
        flight.joined = None
        if not self._batch:
            self._context = 0.0
        self.ledger.count(self._loop.time(), -1)

    def _mark_version(self, flight: Flight) -> None:
        """Record that the request's next tokens come from the current weights."""
        progress = flight.done + (self._steps - flight.joined if flight.joined is not None else 0.0)
        at = int(progress) // self.ledger.unit - flight.before
        if flight.versions and flight.versions[-1][1] == self.version:
            return
        if flight.versions and flight.versions[-1][0] == at:
            flight.versions.pop()
        flight.versions.append((at if flight.versions else 0, self.version))

    def _return(self, flight: Flight) -> None:
        """Answer a request with the tokens that it has."""
        key, ledger = flight.request.key, self.ledger
        self._leave(flight)
        self.flights.pop(key, None)
        if flight.answer.done():
            return
        if complete := flight.done >= flight.total - 2 * _EPSILON:
            units = ledger.units(flight.total) - flight.before
        else:
            units = int(flight.done) // ledger.unit - flight.before
            ledger.progress[key] = flight.done
        versions = [(at, version) for at, version in flight.versions if at < units]
        finish = ("length" if flight.total >= ledger.lengths.longest else "stop") if complete else "abort"
        flight.answer.set_result(Response([1] * units, [-1.0] * units, finish, "", versions))  # type: ignore[arg-type]
