"""A worker that generates and scores groups of samples (``--rollout-workers``).

It runs what the driver runs without such workers: the rollout functions, the hooks of requests and samples, the rewards. Its requests to
engines pass through the driver, which knows the engines and replaces lost ones. Groups and requests travel in both directions in few
calls: ``post`` brings all that the driver has at a time, and ``news`` returns all that the worker has.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import pickle
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from miles_core.contracts.engine import Engine, PauseMode, Request, Response
from miles_core.data.sample import Sample
from miles_core.data.unit import Encoded
from miles_core.errors import DataError, MilesError, first_line
from miles_core.rollout.generate import LocalProducer
from miles_core.run.inputs import RolloutCode
from miles_core.run.parts import freeze_gc
from miles_core.run.problems import Problems
from miles_runtime.local_channel import SHARED
from miles_runtime.mailbox import portable
from miles_runtime.worker import Order, Worker

#: Seconds after which ``news`` returns nothing, so that a worker whose rollouts take long still answers.
WAIT = 5.0
#: Options that limit concurrent calls of a run; workers share them.
LIMITS = ("reward.concurrency", "rollout.max_concurrent_samples")

#: A result, or the error raised instead.
Answer = tuple[Any, Exception | None]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Serialized samples.

    Attributes:
        data: a pickle without large arrays.
        arrays: the bytes of these arrays, uint8 [n] each, which the workers' channel passes on without another copy.
    """

    data: bytes
    arrays: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class GroupOrder:
    """A group to produce.

    Attributes:
        samples: its pending samples.
        indexes: the indexes of the samples.
        evaluation: see ``Producer.produce``.
    """

    samples: Packed
    indexes: tuple[int, ...]
    evaluation: bool


@dataclasses.dataclass(frozen=True)
class EngineCall:
    """A call of an engine that the driver makes for a worker; ``argument`` is a request, or the keys of requests to abort."""

    policy: str
    method: Literal["generate", "abort"]
    argument: Any


@dataclasses.dataclass
class Letters:
    """What the driver sends: new groups and the answers to calls, by ticket, and the state of the run.

    Attributes:
        step: the driver's ``run.step``.
        policies: name -> (``version``, ``trained``).
    """

    step: int
    policies: Mapping[str, tuple[int, int]]
    groups: dict[int, GroupOrder]
    answers: dict[int, Answer]


@dataclasses.dataclass
class News:
    """What a worker sends: calls of engines and finished groups (``Packed``), by ticket, and statistics.

    Attributes:
        cancelled: tickets of calls whose answer the worker no longer waits for.
        answers: see ``Producer.answers``.
    """

    calls: dict[int, EngineCall] = dataclasses.field(default_factory=dict)
    cancelled: list[int] = dataclasses.field(default_factory=list)
    groups: dict[int, Answer] = dataclasses.field(default_factory=dict)
    answers: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)


class RolloutWorker(Worker):
    """Produces groups. Many are in progress at a time."""

    part: LocalProducer

    def __init__(self, order: Order, policy: str) -> None:
        super().__init__(order, policy)
        self._tickets = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._groups: dict[int, tuple[asyncio.Task[None], GroupOrder]] = {}
        self._news, self._happened = News(), asyncio.Event()

    async def build(self, number: int, count: int, policies: Sequence[str]) -> None:
        """Load the code of rollouts and rewards, and start the rollout functions.

        Args:
            number: index of this worker.
            count: number of workers.
            policies: names of the policies that generate.
        """
        config = self.run.config
        shares = {path: share_limit(whole, number, count) for path in LIMITS if (whole := config.get(path)) is not None}
        self.run.config = config.replace(shares, "share of one of several rollout workers")
        problems = Problems()
        code = RolloutCode(self.run.config, problems)
        problems.raise_all()
        code.make(self.run)
        self.part = code.producer(self.run, {name: _DriversEngine(name, self._call) for name in policies})
        await self.part.start()
        freeze_gc()

    def post(self, letters: Letters) -> None:
        """Receive new groups and the answers to calls."""
        self.run.step = letters.step
        for policy in self.run.policies:
            policy.version, policy.trained = letters.policies[policy.name]
        for ticket, (value, error) in letters.answers.items():
            answer = self._calls.get(ticket)
            if answer is None or answer.done():  # the group was dropped meanwhile
                continue
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)
        for ticket, order in letters.groups.items():
            self._groups[ticket] = asyncio.create_task(self._produce(ticket, order)), order

    async def news(self) -> News:
        """Wait for a call or a finished group, at most ``WAIT`` seconds; return all of them. Only one call may be active."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT):
                await self._happened.wait()
        await asyncio.sleep(0)  # include what happens in the same iteration of the event loop
        self._happened.clear()
        found, self._news = self._news, News()
        if self.part is not None:
            found.answers = dict(self.part.answers)
            self.part.answers.clear()
        return found

    async def drop(self, tickets: Collection[int]) -> None:
        """Cancel these groups, and make the engines abort their requests; return when rollout functions have released everything."""
        dropped = [self._groups.pop(ticket) for ticket in tickets if ticket in self._groups]
        for task, _ in dropped:
            task.cancel()
        await asyncio.gather(*(task for task, _ in dropped), return_exceptions=True)
        await self.part.abort([index for _, order in dropped if not order.evaluation for index in order.indexes])

    async def close(self) -> None:
        for task, _ in self._groups.values():
            task.cancel()
        await asyncio.gather(*(task for task, _ in self._groups.values()), return_exceptions=True)
        if self.part is not None:
            await self.part.stop()
        await super().close()

    async def _produce(self, ticket: int, order: GroupOrder) -> None:
        try:
            samples = await self.part.produce(unpack_samples(order.samples), order.evaluation)
            answer: Answer = pack_samples(samples), None
        except Exception as error:
            answer = None, portable(error)
        self._groups.pop(ticket, None)
        self._news.groups[ticket] = answer
        self._happened.set()

    async def _call(self, call: EngineCall) -> Any:
        ticket = next(self._tickets)
        answer = self._calls[ticket] = asyncio.get_running_loop().create_future()
        self._news.calls[ticket] = call
        self._happened.set()
        try:
            return await answer
        except asyncio.CancelledError:
            if self._news.calls.pop(ticket, None) is None:  # it was sent
                self._news.cancelled.append(ticket)
                self._happened.set()
            raise
        finally:
            del self._calls[ticket]


class _DriversEngine(Engine):
    """The engine of a policy, which the driver calls. A worker only generates and aborts."""

    def __init__(self, policy: str, call: Callable[[EngineCall], Awaitable[Any]]) -> None:
        self._policy, self._call = policy, call

    async def generate(self, request: Request) -> Response:
        response: Response = await self._call(EngineCall(self._policy, "generate", request))
        return response

    async def abort(self, keys: Collection[int] | None = None) -> None:
        if keys is None:  # requests of other workers would end, too
            raise self._refusal()
        await self._call(EngineCall(self._policy, "abort", keys))

    @property
    def version(self) -> int:
        raise self._refusal()

    async def start(self) -> None:
        raise self._refusal()

    async def stop(self) -> None:
        raise self._refusal()

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[np.ndarray]:
        raise self._refusal()

    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        raise self._refusal()

    async def pause(self, mode: PauseMode = "abort") -> None:
        raise self._refusal()

    async def resume(self) -> None:
        raise self._refusal()

    def _refusal(self) -> MilesError:
        return MilesError(f"a rollout worker cannot control the engine of {self._policy}; it may generate and abort")


def share_limit(whole: int, number: int, count: int) -> int:
    """Return the part of a limit that worker ``number`` of ``count`` may use; the parts add up to ``whole``."""
    return whole // count + (number < whole % count)


def pack_samples(samples: Sequence[Sample]) -> Packed:
    """Serialize samples for another process.

    Raises:
        DataError: a value cannot be serialized; names the sample and the entry.
    """
    arrays: list[np.ndarray] = []

    def take_out(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= SHARED:
            arrays.append(np.frombuffer(raw, np.uint8))
        return raw.nbytes < SHARED

    try:
        return Packed(pickle.dumps(list(samples), 5, buffer_callback=take_out), arrays)
    except Exception as error:
        for sample in samples:
            for place, value in _entries(sample):
                try:
                    pickle.dumps(value, 5)
                except Exception as cause:
                    raise DataError(
                        f"sample {sample.index}: {place} is a {type(value).__name__}, which cannot be sent between the driver and a "
                        f"rollout worker ({first_line(cause)}); keep plain data there, or leave --rollout-workers out"
                    ) from error
        raise


def _entries(sample: Sample) -> list[tuple[str, Any]]:
    """Return (name, value) of every entry of a sample."""
    named = [(field.name, getattr(sample, field.name)) for field in dataclasses.fields(sample)]
    inner = [(f"metadata[{key!r}]", value) for key, value in sample.metadata.items()]
    return inner + [(f"its {name}", value) for name, value in named]


def unpack_samples(packed: Packed) -> list[Sample]:
    """Inverse of ``pack_samples``.

    Raises:
        DataError: the samples contain an object of a class that this process cannot import.
    """
    try:
        samples: list[Sample] = pickle.loads(packed.data, buffers=packed.arrays)
    except Exception as error:
        raise DataError(
            f"samples cannot be read in the other process ({type(error).__name__}: {first_line(error)}): a prompt source, a rollout "
            "function or a reward stored an object of a class of its own in them; keep plain data there, or leave --rollout-workers out"
        ) from error
    return samples
