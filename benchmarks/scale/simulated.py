"""A runtime whose engine and trainer only take time, on a clock that jumps from event to event.

A single-file plugin (``--plugins benchmarks/scale/simulated.py --runtime simulated``) with which the real loop, schedules and
collector run: 50 steps of a minute each take a second. A response's length is drawn from a long-tailed distribution, keyed on the
sample, so that every schedule generates the same responses.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from miles_core.engine import Engine, Response, SyncReport
from miles_core.plugin import Plugin, PolicyParts, Runtime
from miles_core.precision.schedule import precisions
from miles_core.trainer import Learned, LearnerHandle

plugin = Plugin(
    name="simulated",
    summary="engine and trainer on a simulated clock",
    version="1",
    core=">=0",
    provides={"runtime": {"simulated": "make_runtime"}},
)


@dataclass(frozen=True)
class Costs:
    """Seconds on the simulated clock, per token where it says so, and how long responses are.

    Attributes:
        decode: of one token, whatever the batch; prefill: of one token of a prompt, or of what was generated before an abort.
        train: of one token trained on; push: of one push of weights.
        slots: requests decoded at once.
        median, sigma, longest: of the log-normal lengths of responses, in tokens.
    """

    decode: float = 0.2
    prefill: float = 0.001
    train: float = 0.0016
    push: float = 2.0
    slots: int = 128
    median: float = 50.0
    sigma: float = 1.0
    longest: int = 1024


COSTS = Costs()


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: where nothing is to be done its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout:
            self.loop.now += timeout
        return found


def length_of(key: int) -> int:
    """Tokens of the response with this key."""
    return min(COSTS.longest, 1 + int(random.Random(key).lognormvariate(math.log(COSTS.median), COSTS.sigma)))


@dataclass(eq=False)
class Flight:
    """A request that is being decoded."""

    key: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class SimulatedEngine(Engine):
    """Sleeps as long as a response takes; an aborted one has the tokens that fitted in."""

    capabilities = frozenset({"keyed_sampling"})

    def __init__(self) -> None:
        self._version, self.busy, self.generated = -1, 0.0, 0
        self.flights: list[Flight] = []
        self.slots = asyncio.Semaphore(COSTS.slots)
        self.running = asyncio.Event()
        self.running.set()

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def generate(self, request: Any) -> Response:
        # what was generated before an abort is behind the prompt, and is part of the length that the key gives
        rest = length_of(request.key) - (COSTS.longest - request.sampling.max_new_tokens)
        async with self.slots:
            await self.running.wait()
            loop, version, flight = asyncio.get_running_loop(), self._version, Flight(request.key)
            start = loop.time()
            self.flights.append(flight)
            ready = start + len(request.tokens) * COSTS.prefill
            try:
                async with asyncio.timeout(ready - start + rest * COSTS.decode):
                    await flight.ended.wait()
            except TimeoutError:
                pass
            finally:
                self.flights.remove(flight)
                self.busy += loop.time() - start
        done = rest if not flight.ended.is_set() else int(max(0.0, loop.time() - ready) / COSTS.decode)
        done = min(done, rest)
        self.generated += done
        versions = [(0, version)] if done else []
        return Response([5] * done, [-1.0] * done, "stop" if done == rest else "abort", "", versions)

    async def score(self, sequences: Any, temperature: float = 1.0, media: Any = ()) -> Any:
        raise NotImplementedError

    async def update_weights(self, units: Any, version: int) -> None:
        self._version = version

    async def pause(self, mode: Any = "abort") -> None:
        self.running.clear()
        await self.abort()

    async def abort(self, keys: Collection[int] | None = None) -> None:
        for flight in self.flights:
            if keys is None or flight.key in keys:
                flight.ended.set()

    async def resume(self) -> None:
        self.running.set()


class SimulatedLearner(LearnerHandle):
    """Sleeps as long as training takes."""

    def __init__(self, run: Any, policy: Any, engine: SimulatedEngine) -> None:
        super().__init__(run, policy)
        self.engine, self.busy = engine, 0.0

    async def learn(self, samples: Any, step: int) -> Learned:
        seconds = COSTS.train * sum(len(sample.tokens) for sample in samples)
        self.busy += seconds
        await asyncio.sleep(seconds)
        return Learned({"train/loss": 0.0}, 1)

    async def push(self, version: int) -> SyncReport:
        await asyncio.sleep(COSTS.push)
        await self.engine.update_weights((), version)
        return SyncReport(version, 0, 0, COSTS.push)

    async def nothing(self, *_: Any) -> Any:
        return None

    supervise = reset_optimizer = log_probs = columns = values = top_log_probs = take_snapshot = rebuild = save = (
        load
    ) = export = nothing


class SimulatedRuntime(Runtime):
    """One engine and one learner."""

    def __init__(self, run: Any) -> None:
        self.run = run

    async def build(self, policy: Any) -> PolicyParts:
        engine = SimulatedEngine()
        return PolicyParts(policy, SimulatedLearner(self.run, policy, engine), engine, precisions(self.run.config, 0))

    async def close(self) -> None: ...


def make_runtime(run: Any) -> SimulatedRuntime:
    return SimulatedRuntime(run)
