"""A worker that generates and scores groups of samples (``--rollout-workers``).

The worker runs rollout functions, request and sample hooks, and rewards, which otherwise run in the driver. It sends requests directly to
engines in other processes (``direct_engines``); the driver calls an engine in its own process. Groups and calls are sent in batches:
``post`` delivers everything the driver has at that time, and ``news`` returns everything the worker has.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from miles_core.contracts.engine import Engine, PauseMode, Request, Response
from miles_core.data.media import Media
from miles_core.data.sample import Sample
from miles_core.data.weight_unit import Encoded
from miles_core.errors import MilesError
from miles_core.rollout.generate import LocalProducer
from miles_core.run.inputs import RolloutCode
from miles_core.run.parts import freeze_gc
from miles_core.run.problems import Problems
from miles_workers.direct_engines import DirectEngines, EngineState, LostEngine, ReportedBusyTime
from miles_workers.object_ref import ObjectRef
from miles_workers.packed_column import pack_column, unpack_column
from miles_workers.prompt_rows import RowReader
from miles_workers.remote_sample import heads, pack_samples, read_samples
from miles_workers.timeouts import Timeouts
from miles_workers.worker import Worker, WorkerSpec
from miles_workers.workers import Workers, portable

#: Seconds after which ``news`` returns nothing, so that a worker whose rollouts take long still answers.
WAIT = 5.0
#: Options that limit concurrent calls of a run; workers share them.
LIMITS = ("reward.concurrency", "rollout.max_concurrent_samples")

#: A result, or the error raised instead.
Answer = tuple[Any, Exception | None]


@dataclasses.dataclass(frozen=True)
class GroupOrder:
    """A group to produce.

    Attributes:
        samples: the number of the prompt's row in the prompt files; or a reference with the pending samples, or with the first one if all are
            copies of it with other indexes.
        indexes: the indexes of the samples.
        evaluation: see ``Producer.produce``.
    """

    samples: ObjectRef | int
    indexes: Sequence[int]
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
        policies: name -> (``version``, ``trained``), if they have changed.
        engines: policy -> its engines, if they are in other processes and have changed.
    """

    step: int
    policies: Mapping[str, tuple[int, int]]
    groups: dict[int, GroupOrder] = dataclasses.field(default_factory=dict)
    answers: dict[int, Answer] = dataclasses.field(default_factory=dict)
    engines: Mapping[str, EngineState] = dataclasses.field(default_factory=dict)

    def pack(self) -> tuple[Any, ...]:
        """Return plain data without names of classes and attributes, which would be most of a message with one group."""
        orders = [
            (ticket, order.samples, _start(order.indexes), len(order.indexes), order.evaluation)
            for ticket, order in self.groups.items()
        ]
        columns = [pack_column(column) for column in zip(*orders, strict=True)]
        return self.step, self.policies or None, len(orders), columns, self.answers or None, self.engines or None

    @classmethod
    def unpack(cls, packed: tuple[Any, ...]) -> Letters:
        """Inverse of ``pack``."""
        step, policies, count, columns, answers, engines = packed
        groups = {}
        for ticket, samples, start, size, evaluation in zip(*(unpack_column(c, count) for c in columns), strict=True):
            indexes = range(start, start + size) if isinstance(start, int) else start
            groups[ticket] = GroupOrder(samples, indexes, evaluation)
        return cls(step, policies or {}, groups, answers or {}, engines or {})


def _start(indexes: Sequence[int]) -> int | list[int]:
    """Return the first of consecutive indexes; others as a list."""
    first = indexes[0]
    return first if [*indexes] == [*range(first, first + len(indexes))] else [*indexes]


@dataclasses.dataclass
class News:
    """What a worker sends: calls of engines and finished groups, by ticket, and statistics.

    Attributes:
        cancelled: tickets of calls whose answer the worker no longer waits for.
        groups: for each, the ``heads`` of its samples and the number of its object, which is sent next to the news.
        answers: see ``Producer.answers``.
        lost: engines that the worker lost.
        busy: engine and 1 when its first request is sent, -1 when the last one is complete; in order.
    """

    calls: dict[int, EngineCall] = dataclasses.field(default_factory=dict)
    cancelled: list[int] = dataclasses.field(default_factory=list)
    groups: dict[int, Answer] = dataclasses.field(default_factory=dict)
    answers: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    lost: list[LostEngine] = dataclasses.field(default_factory=list)
    busy: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def pack(self) -> dict[int, Any]:
        """Return the attributes that are not empty, by their positions. Equal columns of several groups become one object, to which pickle
        refers."""
        seen: dict[str, Any] = {}
        for (_, columns), _ in filter(None, (value for value, _ in self.groups.values())):
            columns[:] = [seen.setdefault(repr(c), c) if type(c) is tuple else c for c in columns]
        return {number: value for number, value in enumerate(vars(self).values()) if value}

    @classmethod
    def unpack(cls, packed: Mapping[int, Any]) -> News:
        """Inverse of ``pack``."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{names[number]: value for number, value in packed.items()})


@dataclasses.dataclass(frozen=True)
class Seat:
    """Position of a worker.

    Attributes:
        number: index of the worker.
        count: number of workers.
        client: name under which it sends requests to engines.
        policies: names of the policies that generate.
        engines: policy -> handle to its engines and the result of ``EngineWorker.build``, if they are in other processes.
    """

    number: int
    count: int
    client: str
    policies: Sequence[str]
    engines: Mapping[str, tuple[Workers, Mapping[str, Any]]]


class RolloutWorker(Worker):
    """Produces groups. Many are in progress at a time.

    - consumes: orders for groups, answers to calls and the set of serving engines, from the driver (``post``).
    - waits: for engines; while none of them serves, until the driver sends another set.
    - unblocks: the driver, with finished groups and calls of its engines (``news``).
    """

    part: LocalProducer

    def __init__(self, spec: WorkerSpec, policy: str) -> None:
        super().__init__(spec, policy)
        self._tickets = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._groups: dict[int, tuple[asyncio.Task[None], GroupOrder]] = {}
        self._news, self._happened = News(), asyncio.Event()
        self._refs: list[ObjectRef] = []
        self._direct: dict[str, DirectEngines] = {}

    async def build(self, seat: Seat) -> tuple[str, str]:
        """Load the code of rollouts and rewards, start the rollout functions and open the prompt files; return ``digest`` and ``problem``
        of the ``RowReader``."""
        config = self.run.config
        limits = {path: whole for path in LIMITS if (whole := config.get(path)) is not None}
        shares = {path: share_limit(whole, seat.number, seat.count) for path, whole in limits.items()}
        self.run.config = config.replace(shares, "share of one of several rollout workers")
        problems = Problems()
        code = RolloutCode(self.run.config, problems)
        problems.raise_all()
        code.make(self.run)
        self._direct = {name: self._connect(seat, name) for name in seat.engines}
        engines = {name: self._direct.get(name) or _DriversEngine(name, self._call) for name in seat.policies}
        self.part = code.producer(self.run, engines)
        await self.part.start()
        self._rows = RowReader(self.run)
        freeze_gc()
        return self._rows.digest, self._rows.problem

    def _connect(self, seat: Seat, policy: str) -> DirectEngines:
        engines, build_info = seat.engines[policy]
        options, place = self.run.config.run, (seat.number, seat.count)
        timeouts = Timeouts(options.worker_timeout, options.worker_build_timeout)
        return DirectEngines(
            policy,
            engines,
            build_info,
            seat.client,
            place,
            timeouts,
            ReportedBusyTime(self._report_busy),
            self._report_lost,
        )

    def _report_busy(self, engine: str, change: int) -> None:
        self._news.busy.append((engine, change))
        self._happened.set()

    def _report_lost(self, lost: LostEngine) -> None:
        self._news.lost.append(lost)
        self._happened.set()

    def post(self, packed: tuple[Any, ...]) -> None:
        """Receive new groups and the answers to calls, as packed ``Letters``."""
        letters = Letters.unpack(packed)
        self.run.step = letters.step
        for policy in self.run.policies if letters.policies else ():
            policy.version, policy.trained = letters.policies[policy.name]
        for name, state in letters.engines.items():
            self._direct[name].update(state)
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

    async def news(self) -> tuple[dict[int, Any], list[ObjectRef]]:
        """Wait for a call or a finished group, at most ``WAIT`` seconds; return all of them as packed ``News``, and the samples of the
        groups. Only one call may be active."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT):
                await self._happened.wait()
        await asyncio.sleep(0)  # include what happens in the same iteration of the event loop
        self._happened.clear()
        found, self._news = self._news, News()
        refs, self._refs = self._refs, []
        if self.part is not None:
            found.answers = dict(self.part.answers)
            self.part.answers.clear()
        return found.pack(), refs

    async def drop(self, tickets: Collection[int]) -> None:
        """Cancel these groups, and make the engines abort their requests; return when rollout functions have released everything."""
        dropped = [self._groups.pop(ticket) for ticket in tickets if ticket in self._groups]
        for task, _ in dropped:
            task.cancel()
        await asyncio.gather(*(task for task, _ in dropped), return_exceptions=True)
        await self.part.abort([index for _, order in dropped if not order.evaluation for index in order.indexes])

    def cancel_groups(self) -> None:
        """Cancel all groups."""
        for task, _ in self._groups.values():
            task.cancel()

    async def close(self) -> None:
        self.cancel_groups()
        await asyncio.gather(*(task for task, _ in self._groups.values()), return_exceptions=True)
        if self.part is not None:
            await self.part.stop()
        await super().close()

    async def _produce(self, ticket: int, order: GroupOrder) -> None:
        try:
            samples = await self.part.produce(self._pending(order), order.evaluation)
            packed = pack_samples(samples)
            answer: Answer = (heads(samples), len(self._refs)), None
            self._refs.append(packed)
        except Exception as error:
            answer = None, portable(error)
        self._groups.pop(ticket, None)
        self._news.groups[ticket] = answer
        self._happened.set()

    def _pending(self, order: GroupOrder) -> Sequence[Sample]:
        """Return the pending samples of a group."""
        if isinstance(order.samples, int):
            return self._rows.read(order.samples, order.indexes)
        samples = read_samples(order.samples)
        while len(samples) < len(order.indexes):
            samples += read_samples(order.samples)
            samples[-1].index = order.indexes[len(samples) - 1]
        return samples

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

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        media: Sequence[tuple[Media, ...]] = (),
    ) -> list[np.ndarray]:
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
