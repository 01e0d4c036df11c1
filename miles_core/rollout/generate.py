"""Generates the samples of a prompt: calls a rollout function, and records the responses to its requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_core.contracts.answer import Answer
from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.contracts.runtime import Producer
from miles_core.data.batch import add
from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError
from miles_core.rollout.collect import Scorer
from miles_core.rollout.continuation import check_samples
from miles_core.rollout.function import GenerationClient, RolloutFunction, SingleTurn
from miles_core.rollout.requests import EngineRequests
from miles_core.rollout.sampling import evaluation_sampling, training_sampling
from miles_core.rollout.transcript import add_response
from miles_core.rollout.versions import mask_older
from miles_core.text import describe_error, describe_notes

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.run import Run


@dataclass(frozen=True)
class Functions:
    """The rollout functions of a run.

    Attributes:
        default: name of the function for samples that do not name one.
        by_name: all functions by the name in the configuration (``--generate NAME``, or a path).
        key: key of the metadata entry with the name of a sample's function (``--generate-key``); "" if there is none.
    """

    default: str
    by_name: Mapping[str, RolloutFunction]
    key: str = ""

    def of(self, sample: Sample) -> tuple[str, RolloutFunction]:
        """Return the name and the function for a sample.

        Raises:
            DataError: the sample's metadata names an unknown function.
        """
        name = sample.metadata.get(self.key, self.default) if self.key else self.default
        if not isinstance(name, str) or name not in self.by_name:
            raise DataError(
                f"sample {sample.index}: its metadata names the rollout function {name!r:.80} (--generate-key {self.key}); the "
                f"functions of this run are: {', '.join(self.by_name)}"
            )
        return name, self.by_name[name]

    def are_single_turns(self, samples: Sequence[Sample]) -> bool:
        """Whether ``SingleTurn`` generates all of these samples."""
        return all(type(self.of(sample)[1]) is SingleTurn for sample in (samples if self.key else samples[:1]))


class Arrivals:
    """Futures in the order in which they are done. Those of the same iteration of the event loop, such as the responses of rows that end in
    the same step of an engine, arrive together."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[Any]] = []
        self._done: list[asyncio.Future[Any]] = []
        self._news: asyncio.Future[None] | None = None  # of ``next``, while it waits
        self._open = 0

    def add(self, awaited: Awaitable[Any]) -> asyncio.Future[Any]:
        """Wait for a future, or start a coroutine; returns the future that ``next`` will return."""
        future: asyncio.Future[Any]
        if not isinstance(awaited, Answer):
            future = asyncio.ensure_future(awaited)
            future.add_done_callback(self._note)
        else:
            future = awaited
            if awaited.done():
                self._note(awaited)
            else:
                awaited.receiver = self._note
        self._futures.append(future)
        self._open += 1
        return future

    async def next(self) -> list[asyncio.Future[Any]]:
        """Return the futures that are done since the last call, after waiting for at least one; [] if there are no more."""
        if not self._open:
            self._futures.clear()  # answers refer to their receiver
            return []
        if not self._done:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        arrived, self._done = self._done, []
        self._open -= len(arrived)
        return arrived

    async def cancel(self) -> None:
        """Cancel what is not done, and wait for its end. No error of these futures is reported any more."""
        for future in self._futures:
            future.cancel()
        await asyncio.gather(*self._futures, return_exceptions=True)
        self._futures.clear()

    def _note(self, future: asyncio.Future[Any]) -> None:
        self._done.append(future)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


#: A sample, its request, the request as ``on_request`` changed it, and the response.
Answered = tuple[Sample, Request, Request, Response]
#: Receives finished samples; returns what is left to do for them, or None.
Finish = Callable[[list[Sample]], Coroutine[Any, Any, None] | None]


def _nothing(samples: list[Sample]) -> None:
    """``Finish`` of samples for which nothing is left to do."""


class Generator:
    """Generates one or more finished samples from a pending sample.

    Args:
        run: for hooks, fields and configuration.
        engines: name of a generating policy -> the engine for its requests.
        sampling: the default sampling parameters.
        functions: the rollout functions.
        answers: collects statistics of requests and rollouts, metric -> (sum, count).
    """

    def __init__(
        self,
        run: Run,
        engines: Mapping[str, Engine],
        sampling: Sampling,
        functions: Functions,
        answers: dict[str, tuple[float, float]] | None = None,
    ) -> None:
        self.run, self.sampling, self.functions = run, sampling, functions
        self.answers = {} if answers is None else answers
        self.requests = EngineRequests(run, engines, sampling, self.answers)
        self._default = run.policy.name
        self._trains = {policy.name for policy in run.policies if policy.role == "train"}
        self._masks_older = run.config.rollout.mask_offpolicy_in_partial_rollout
        limit = run.config.rollout.max_concurrent_samples
        self.slots = asyncio.Semaphore(limit) if limit else None
        required = any(spec.required for spec in run.fields)
        self._checks = bool(required or run.hooks.implemented["on_sample"] or self._masks_older)

    async def generate(self, sample: Sample) -> list[Sample]:
        """Call the sample's rollout function. Each returned sample is validated; ``on_sample`` runs for each complete one."""
        name, function = self.functions.of(sample)
        async with self.slots or contextlib.nullcontext():
            if type(function) is SingleTurn:
                return await self.take_turns([sample])
            sample.policy = sample.policy or self._default
            samples = await self._call_function(function, name, sample)
        self._check(samples)
        self.requests.keys.forget([sample.index])
        return samples

    async def take_turns(self, samples: Sequence[Sample], finish: Finish = _nothing) -> list[Sample]:
        """Generate one turn for each sample, as ``SingleTurn`` does, without a transcript, and without a task for each: most runs generate
        all samples here. Samples whose responses arrive together are completed together; ``finish`` is called with them."""
        arrivals, start = Arrivals(), time.perf_counter()
        asked: dict[asyncio.Future[Response], tuple[Sample, Request, Request]] = {}
        try:
            for sample in samples:
                if not sample.policy:
                    sample.policy = self._default
                first = self.requests.make(
                    sample.index, sample.group_index, sample.tokens, self.sampling, sample.policy, sample.media
                )
                sent, answer = self.requests.send(sample.index, first)
                asked[arrivals.add(answer)] = sample, first, sent
            while arrived := await arrivals.next():
                answered: list[Answered] = []
                for future in arrived:
                    result = future.result()  # raises errors, also of ``later``
                    if future in asked:
                        answered.append((*asked[future], result))
                if answered:
                    self._receive(answered, start, arrivals, finish)
        except BaseException:
            await arrivals.cancel()
            raise
        return list(samples)

    def _receive(self, answered: Sequence[Answered], start: float, arrivals: Arrivals, finish: Finish) -> None:
        """Complete samples with the first responses to their requests, which ``arrivals`` returned together."""
        self.requests.receive([sent for _, _, sent, _ in answered], [response for *_, response in answered], start)
        whole: list[tuple[Sample, Response]] = []
        for sample, first, sent, response in answered:
            if self.requests.is_complete(response):
                whole.append((sample, response))
            else:
                arrivals.add(self._continue(sample, first, sent, response, finish))
        if whole and (later := self._complete(whole, finish)) is not None:
            arrivals.add(later)

    async def _continue(
        self, sample: Sample, first: Request, sent: Request, response: Response, finish: Finish
    ) -> None:
        complete = await self.requests.complete(sample.index, first, (sent, response))
        if (later := self._complete([(sample, complete)], finish)) is not None:
            await later

    def _complete(
        self, answered: Sequence[tuple[Sample, Response]], finish: Finish
    ) -> Coroutine[Any, Any, None] | None:
        """Complete samples with their whole responses, and call ``finish``."""
        self.requests.count_unknown([response for _, response in answered])
        samples = [add_response(sample, response, self.run.fields) for sample, response in answered]
        self.requests.keys.forget([sample.index for sample in samples])
        if self._checks or any(sample.fields for sample in samples):  # the checks of responses cover all others
            self._check(samples)
        return finish(samples)

    def _check(self, samples: Sequence[Sample]) -> None:
        """Validate finished samples and call ``on_sample``."""
        for one in samples:
            if self._masks_older:
                mask_older(one)
            one.validate(self.run.fields)
            if one.status not in (Status.ABORTED, Status.FAILED):
                self.run.hooks.on("on_sample", run=self.run, sample=one)

    async def abort(self, samples: Collection[int]) -> None:
        """Make the engines abort all requests of these samples. The caller has cancelled the samples' tasks."""
        await self.requests.abort(samples)
        self.requests.keys.forget(samples)

    def _client(self, sample: Sample) -> GenerationClient:
        start = functools.partial(self.requests.start, sample.index, sample.group_index)
        tokenizer, renderer = self.run.tokenizer, self.run.render.renderer
        decode, learns = self.requests.decode, self._trains.__contains__
        return GenerationClient(sample, sample.policy, start, self.sampling, tokenizer, renderer, decode, learns)

    async def _call_function(self, function: RolloutFunction, name: str, sample: Sample) -> list[Sample]:
        """Call a rollout function, check and complete the returned samples and count what it did; errors name the function and the sample."""
        sample.tokens = sample.tokens[:]  # the samples of a prompt share them, and the function may change them
        client = self._client(sample)
        number, group, label = sample.index, sample.group_index, f"the rollout function {name}"
        if owner := self.run.hooks.provider("generate", name):
            label += f" of plugin {owner}"
        try:
            made = await function(sample, client)
            if client.abandoned:
                await self.requests.abort([number])
        except DataError as error:
            raise DataError(f"{label}, on sample {number}: {error}") from error
        except Exception as error:
            if any(error is failure for failure in client.failures):  # raised by the engine, not by the function
                raise
            what = describe_error(error) + describe_notes(error)
            raise DataError(f"{label}, on sample {number}: it raised {what}") from error
        samples = check_samples(made, number, label, self.requests.vocabulary)
        for one in samples:
            one.group_index, one.rollout_id = group, number
            one.policy = one.policy or client.policy
            turn = client.transcript.find(one.tokens)
            one.media = sample.media if turn is None else turn.media
        counts = {
            "rollout/turns": len(client.transcript.turns),
            "rollout/branches": client.transcript.branches,
            "rollout/unused_turns": client.transcript.unused(samples),
            "rollout/failed": any(sample.status is Status.FAILED for sample in samples),
        }
        add(self.answers, {name: (float(value), 1.0) for name, value in (counts | client.metrics).items()})
        for one in samples:
            client.transcript.fill(one, self.run.fields)
        return samples


class LocalProducer(Producer):
    """Produces groups in this process.

    Args:
        run, engines, functions: see ``Generator``.
        score: rewards samples, each as soon as it is generated if the reward functions score single samples.
    """

    def __init__(self, run: Run, engines: Mapping[str, Engine], functions: Functions, score: Scorer) -> None:
        super().__init__()
        self.engines, self.functions, self.score = engines, functions, score
        self.training = Generator(run, engines, training_sampling(run.config), functions, self.answers)
        self.evaluating = self.training
        if run.config.evaluation.prompt_data:
            self.evaluating = Generator(run, engines, evaluation_sampling(run.config), functions)
        self._started = contextlib.AsyncExitStack()

    async def start(self) -> None:
        for function in self.functions.by_name.values():
            self._started.push_async_callback(function.stop)
            await function.start()

    async def stop(self) -> None:
        await self._started.aclose()

    async def produce(self, samples: Sequence[Sample], evaluation: bool = False) -> list[Sample]:
        generator = self.evaluating if evaluation else self.training
        by_sample = self.score.by_sample
        finish = functools.partial(self.score.start, evaluation=evaluation) if by_sample else _nothing
        if generator.slots is None and self.functions.are_single_turns(samples):
            group = await generator.take_turns(samples, finish)
        else:
            group = await self._call_functions(generator, samples, finish)
        if not by_sample:
            await self.score(group, evaluation)
        return group

    async def _call_functions(self, generator: Generator, samples: Sequence[Sample], finish: Finish) -> list[Sample]:
        async def generate(sample: Sample) -> list[Sample]:
            made = await generator.generate(sample)
            if (later := finish(made)) is not None:
                await later
            return made

        tasks = [asyncio.create_task(generate(sample)) for sample in samples]
        try:
            return [s for made in await asyncio.gather(*tasks) for s in made]
        finally:
            if left := [task for task in tasks if task.cancel()]:  # those that are not done
                await asyncio.gather(*left, return_exceptions=True)

    async def abort(self, samples: Collection[int]) -> None:
        await self.training.abort(samples)
