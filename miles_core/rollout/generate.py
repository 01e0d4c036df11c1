"""Generates the samples of a prompt: calls a rollout function, sends its requests to engines and records their responses."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.contracts.runtime import Producer
from miles_core.data.batch import add
from miles_core.data.column import TOKENS, Column, as_column, join_columns
from miles_core.data.media import Media
from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError, MilesError, describe
from miles_core.plugin.boundary import Guard
from miles_core.rollout.collect import Scorer
from miles_core.rollout.continuation import (
    can_continue,
    check_samples,
    cut_at_stop,
    join_parts,
    partial_rollout,
)
from miles_core.rollout.function import GenerationClient, RolloutFunction, SingleTurn
from miles_core.rollout.keys import RequestKeys
from miles_core.rollout.sampling import evaluation_sampling, training_sampling
from miles_core.rollout.transcript import add_response
from miles_core.rollout.versions import mask_older
from miles_core.text import describe_error

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.run import Run

#: The run stops after this many consecutive aborted responses from which a request cannot continue.
FRUITLESS = 100


@dataclasses.dataclass(frozen=True)
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


def find_ids_without_token(tokenizer: Any, vocabulary: int) -> np.ndarray | None:
    """Return which of the model's ids the tokenizer does not have, bool [vocabulary]; None if it has all. Output layers are often padded."""
    known = np.fromiter(tokenizer.get_vocab().values(), np.int64)
    missing = np.ones(vocabulary, bool)
    missing[known[known < vocabulary]] = False
    return missing if missing.any() else None


class EngineRequests:
    """Sends the requests of samples to engines, and continues those that an engine aborts.

    Args:
        run: for hooks, fields and configuration.
        engines: name of a generating policy -> its engine.
        sampling: the default sampling parameters.
        answers: collects statistics of requests, metric -> (sum, count).
    """

    def __init__(
        self, run: Run, engines: Mapping[str, Engine], sampling: Sampling, answers: dict[str, tuple[float, float]]
    ) -> None:
        self.run, self.engines, self.answers, self.keys = run, engines, answers, RequestKeys()
        extras = {"sampling_support"} if sampling.truncated and not run.config.rollout.full_vocab_logprobs else set()
        self.extras = frozenset(extras)
        self.vocabulary = int(run.plan.fact("model.vocab_size") or len(run.tokenizer))
        self._without_token = find_ids_without_token(run.tokenizer, self.vocabulary)
        self.policies = {policy.name: policy for policy in run.policies}

    def start(
        self,
        number: int,
        group: int,
        tokens: Sequence[int],
        sampling: Sampling,
        policy: str,
        media: tuple[Media, ...] = (),
    ) -> Awaitable[Response]:
        """Return the response to ``tokens`` of a sample, to be awaited. Its key follows from the order of these calls."""
        return self._complete(number, group, media, as_column(tokens, TOKENS), sampling, policy, self.keys.next(number))

    async def abort(self, samples: Iterable[int]) -> None:
        """Make the engines abort all requests of these samples."""
        keys = self.keys.keys_of(samples)
        for engine in self.engines.values():
            await engine.abort(keys)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self.run.tokenizer.decode(list(tokens), skip_special_tokens=True))

    async def _complete(
        self,
        number: int,
        group: int,
        media: tuple[Media, ...],
        tokens: Column,
        sampling: Sampling,
        policy: str,
        key: int,
    ) -> Response:
        """Generate one complete response, continuing it with further requests if the engine aborts it.

        With ``--partial-rollout`` a response may continue under new weights. Otherwise all its tokens come from one weight version:
        the response starts again if the weights changed. All requests draw their random numbers from ``key``. ``on_request`` runs
        before each request is sent.
        """
        engine = self._engine(number, policy)
        parts: list[Response] = []
        fruitless = 0
        while fruitless < FRUITLESS:
            generated, rest = join_columns(part.tokens for part in parts), sampling
            if parts:
                rest = dataclasses.replace(sampling, max_new_tokens=sampling.max_new_tokens - len(generated))
            request = Request(
                tokens + generated, rest, key=key, group=group, extras=set(self.extras), policy=policy, media=media
            )
            response = await self._send(engine, request)
            if response.finish == "abort" and not can_continue(response, request):
                fruitless += 1
                continue
            parts.append(response)
            cut_at_stop(parts, sampling.stop, self.run.fields, self.decode)
            if _has_several_versions(parts) and not partial_rollout(self.run.config):
                parts.clear()
                fruitless += 1
            elif parts[-1].finish != "abort":
                return self._count_unknown(join_parts(parts, sampling.stop, self.run.fields, self.decode))
            else:
                fruitless = 0
        raise MilesError(
            f"the engine aborted the request of sample {number} {FRUITLESS} times in a row without a token to continue from; "
            "see the engine's log"
        )

    async def _send(self, engine: Engine, request: Request) -> Response:
        """Send one request and check the response."""
        self.run.hooks.on("on_request", run=self.run, policy=self.policies[request.policy], request=request)
        start = time.perf_counter()
        response = await engine.generate(request)
        self.run.clock.record("engine request", start)
        self._check_response(request, response)
        if response.metrics:
            prefix = "engine" if len(self.engines) == 1 else f"{request.policy}/engine"
            add(self.answers, {f"{prefix}/{name}": (value, 1.0) for name, value in response.metrics.items()})
        if response.finish == "abort" and len(response.tokens) == request.sampling.max_new_tokens:
            response.finish = "length"
        return response

    def _count_unknown(self, response: Response) -> Response:
        """Count the ids that have no token in the tokenizer; returns the response."""
        tokens = response.tokens
        if self._without_token is not None and tokens:
            unknown = int(self._without_token[np.asarray(tokens)].sum())
            add(self.answers, {"rollout/ids_without_token": (float(unknown), float(len(tokens)))})
        return response

    def _check_response(self, request: Request, response: Any) -> None:
        """Check an engine's response; raises PluginError, which names the plugin that provides the engine."""
        if not isinstance(response, Response):
            self._guard.accept(f"it returned {describe(response)}; expected a Response from Engine.generate")
        if fault := response.find_fault(request, self.vocabulary):
            self._guard.accept(f"the response has {fault}")

    @functools.cached_property
    def _guard(self) -> Guard:
        name = self.run.config.run.engine
        return Guard(self.run.hooks.provider("engine", name), f"make_engine ({name})")

    def _engine(self, number: int, policy: str) -> Engine:
        if policy not in self.engines:
            raise DataError(
                f"sample {number} asks the policy {policy!r}; the policies of this run that generate are: {', '.join(self.engines)}"
            )
        return self.engines[policy]


def _has_several_versions(parts: Sequence[Response]) -> bool:
    return len({version for part in parts for _, version in part.weight_versions}) > 1


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
        self._trains = {policy.name for policy in run.policies if policy.role == "train"}
        limit = run.config.rollout.max_concurrent_samples
        self._slots = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()

    async def generate(self, sample: Sample) -> list[Sample]:
        """Call the sample's rollout function. Each returned sample is validated; ``on_sample`` runs for each complete one."""
        number = sample.index
        name, function = self.functions.of(sample)
        if not sample.policy:
            sample.policy = self.run.policy.name
        async with self._slots:
            if type(function) is SingleTurn:
                samples = [await self._take_turn(sample)]
            else:
                samples = await self._call_function(function, name, sample)
        for one in samples:
            if self.run.config.rollout.mask_offpolicy_in_partial_rollout:
                mask_older(one)
            one.validate(self.run.fields)
            if one.status not in (Status.ABORTED, Status.FAILED):
                self.run.hooks.on("on_sample", run=self.run, sample=one)
        self.requests.keys.forget([number])
        return samples

    async def abort(self, samples: Collection[int]) -> None:
        """Make the engines abort all requests of these samples. The caller has cancelled the samples' tasks."""
        await self.requests.abort(samples)
        self.requests.keys.forget(samples)

    def _client(self, sample: Sample) -> GenerationClient:
        start = functools.partial(self.requests.start, sample.index, sample.group_index)
        tokenizer, renderer = self.run.tokenizer, self.run.render.renderer
        decode, learns = self.requests.decode, self._trains.__contains__
        return GenerationClient(sample, sample.policy, start, self.sampling, tokenizer, renderer, decode, learns)

    async def _take_turn(self, sample: Sample) -> Sample:
        """Generate as ``SingleTurn`` does, without a transcript: most runs generate all samples here."""
        number, group, tokens, media = sample.index, sample.group_index, sample.tokens, sample.media
        response = await self.requests.start(number, group, tokens, self.sampling, sample.policy, media)
        return add_response(sample, response, self.run.fields)

    async def _call_function(self, function: RolloutFunction, name: str, sample: Sample) -> list[Sample]:
        """Call a rollout function, check and complete the returned samples and count what it did; errors name the function and the sample."""
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
            raise DataError(f"{label}, on sample {number}: it raised {describe_error(error)}") from error
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
        generate = (
            functools.partial(self._generate_scored, generator, evaluation)
            if self.score.by_sample
            else generator.generate
        )
        tasks = [asyncio.create_task(generate(sample)) for sample in samples]
        try:
            group = [s for made in await asyncio.gather(*tasks) for s in made]
        finally:
            if left := [task for task in tasks if task.cancel()]:  # those that are not done
                await asyncio.gather(*left, return_exceptions=True)
        if not self.score.by_sample:
            await self.score(group, evaluation)
        return group

    async def _generate_scored(self, generator: Generator, evaluation: bool, sample: Sample) -> list[Sample]:
        made = await generator.generate(sample)
        await self.score(made, evaluation)
        return made

    async def abort(self, samples: Collection[int]) -> None:
        await self.training.abort(samples)
