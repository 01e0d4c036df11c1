"""Sends the requests of samples to engines, checks the responses, and continues those that an engine aborts.

The key of a request seeds its random numbers and identifies it when it is aborted. A key is a 63-bit integer with two parts: the low 42
bits hold the sample's number, the high bits hold the index of the call within the sample. The key of the first call therefore equals the
sample's number. Samples of training, evaluation and verification are numbered from different offsets, so no two requests in flight share
a key.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.engine import FINISHES, ROUNDING, Request, Response, Sampling
from miles_core.data.batch import add
from miles_core.data.column import FLOATS, TOKENS, Column, join_columns
from miles_core.data.media import Media
from miles_core.errors import DataError, MilesError, describe
from miles_core.plugin.boundary import Guard
from miles_core.rollout.continuation import can_continue, cut_at_stop, join_parts, partial_rollout

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.run import Run

_SAMPLE_BITS = 42
#: Limits on the number of samples in a run and of engine calls per sample (keys are signed 64-bit integers).
MAX_SAMPLES, MAX_CALLS = 1 << _SAMPLE_BITS, 1 << (63 - _SAMPLE_BITS)
#: First number of evaluation samples: they share no random number with training samples.
FIRST_EVALUATION = 1 << 40
#: First number of samples that verify the weights.
FIRST_PROBE = 1 << 41
#: The run stops after this many consecutive aborted responses from which a request cannot continue.
FRUITLESS = 100


def request_key(sample: int, call: int) -> int:
    """Return the key of an engine call.

    Args:
        sample: the sample's number, from 0.
        call: index of the call within the sample, from 0. A request that continues an aborted one reuses its index.

    Raises:
        MilesError: an argument is out of range.
    """
    if not 0 <= sample < MAX_SAMPLES:
        raise MilesError(
            f"sample {sample} has no key for its random numbers: samples are numbered 0 to {MAX_SAMPLES - 1}"
        )
    if not 0 <= call < MAX_CALLS:
        raise MilesError(
            f"sample {sample} calls the engine more than {MAX_CALLS} times; end its generate function earlier"
        )
    return call << _SAMPLE_BITS | sample


class RequestKeys:
    """Numbers the engine calls of each sample, from its first call until ``forget``."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}

    def next(self, sample: int) -> int:
        """Return the key of this sample's next call."""
        call = self._calls.get(sample, 0)
        key = request_key(sample, call) if call or not 0 <= sample < MAX_SAMPLES else sample  # usually the first call
        self._calls[sample] = call + 1
        return key

    def keys_of(self, samples: Iterable[int]) -> list[int]:
        """Return every key issued to these samples; the caller aborts these requests when it drops the samples."""
        return [request_key(sample, call) for sample in samples for call in range(self._calls.get(sample, 0))]

    def forget(self, samples: Iterable[int]) -> None:
        """Reset the call count of these samples. A sample that is generated again starts from its first key."""
        for sample in samples:
            self._calls.pop(sample, None)


def find_ids_without_token(tokenizer: Any, vocabulary: int) -> np.ndarray | None:
    """Return which of the model's ids the tokenizer does not have, bool [vocabulary]; None if it has all. Output layers are often padded."""
    known = np.fromiter(tokenizer.get_vocab().values(), np.int64)
    missing = np.ones(vocabulary, bool)
    missing[known[known < vocabulary]] = False
    return missing if missing.any() else None


def are_valid(requests: Sequence[Request], responses: Sequence[Any], vocabulary: int) -> bool:
    """Check all responses in a few array operations. Returns False if one is invalid or unusual; ``Response.find_fault`` then decides for each."""
    for request, response in zip(requests, responses, strict=True):
        if type(response) is not Response or len(response.weight_versions) != 1:
            return False
        tokens, log_probs, version = response.tokens, response.log_probs, response.weight_versions[0]
        usual = (
            type(tokens) is type(log_probs) is Column
            and tokens.typecode == TOKENS
            and log_probs.typecode == FLOATS
            and 0 < len(tokens) == len(log_probs) <= request.sampling.max_new_tokens
            and response.finish in FINISHES
            and type(version) is tuple
            and len(version) == 2
            and version[0] == 0
        )
        if not usual:
            return False
    ids = np.frombuffer(b"".join([response.tokens for response in responses]), np.uint32)  # negative numbers are large
    log_probs = np.frombuffer(b"".join([response.log_probs for response in responses]))
    low, high = np.minimum.reduce(log_probs), np.maximum.reduce(log_probs)  # NaN if one is
    return bool(np.maximum.reduce(ids) < vocabulary and -inf < low and high <= ROUNDING)


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
        self._partial = partial_rollout(run.config)
        self._changed = bool(run.hooks.implemented["on_request"])

    def start(self, number: int, *request: Any) -> Awaitable[Response]:
        """Return the response to ``make(number, *request)``, to be awaited. Its key follows from the order of these calls."""
        return self.complete(number, self.make(number, *request))

    def make(
        self,
        number: int,
        group: int,
        tokens: Sequence[int],
        sampling: Sampling,
        policy: str,
        media: tuple[Media, ...] = (),
    ) -> Request:
        """Make the next request of a sample."""
        return Request(tokens, sampling, self.keys.next(number), group, set(self.extras), {}, policy, media)

    async def abort(self, samples: Iterable[int]) -> None:
        """Make the engines abort all requests of these samples."""
        keys = self.keys.keys_of(samples)
        for engine in self.engines.values():
            await engine.abort(keys)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self.run.tokenizer.decode(list(tokens), skip_special_tokens=True))

    async def complete(self, number: int, first: Request, begun: tuple[Request, Response] | None = None) -> Response:
        """Generate one complete response, continuing it with further requests if the engine aborts it.

        With ``--partial-rollout`` a response may continue under new weights. Otherwise all its tokens come from one weight version:
        the response starts again if the weights changed. All requests draw their random numbers from one key. ``on_request`` runs
        before each request is sent.

        Args:
            number: number of the sample.
            first: the request, as it was before ``on_request``.
            begun: the first request that was sent, and the response that ``receive`` has checked; None if nothing was sent.
        """
        stop, parts, fruitless = first.sampling.stop, list[Response](), 0
        while fruitless < FRUITLESS:
            request, part = begun or await self._ask(number, self._continue(first, parts))
            begun = None
            if part.finish == "abort" and not can_continue(part, request):
                fruitless += 1
                continue
            parts.append(part)
            cut_at_stop(parts, stop, self.run.fields, self.decode)
            if _has_several_versions(parts) and not self._partial:
                parts.clear()
                fruitless += 1
            elif parts[-1].finish != "abort":
                joined = join_parts(parts, stop, self.run.fields, self.decode)
                self.count_unknown([joined])
                return joined
            else:
                fruitless = 0
        raise MilesError(
            f"the engine aborted the request of sample {number} {FRUITLESS} times in a row without a token to continue from; "
            "see the engine's log"
        )

    def is_complete(self, response: Response) -> bool:
        """Whether ``complete`` returns this first response as it is."""
        one = self._partial or len(response.weight_versions) < 2 or not _has_several_versions([response])
        return one and response.finish != "abort"

    async def _ask(self, number: int, request: Request) -> tuple[Request, Response]:
        start = time.perf_counter()
        sent, answer = self.send(number, request)
        response = await answer
        self.receive([sent], [response], start)
        return sent, response

    def send(self, number: int, request: Request) -> tuple[Request, Awaitable[Response]]:
        """Send a request of a sample: returns it as ``on_request`` changed it, and the response, for ``receive``."""
        engine = self.engines.get(request.policy)
        if engine is None:
            raise DataError(
                f"sample {number} asks the policy {request.policy!r}; the policies of this run that generate are: {', '.join(self.engines)}"
            )
        if self._changed:
            request = dataclasses.replace(request, tokens=request.tokens[:], extras=set(request.extras), metadata={})
            self.run.hooks.on("on_request", run=self.run, policy=self.policies[request.policy], request=request)
        return request, engine.generate(request)

    def receive(self, requests: Sequence[Request], responses: Sequence[Response], start: float) -> None:
        """Check responses that arrived together, and record their measurements.

        Raises:
            PluginError: a response is invalid; names the plugin that provides the engine.
        """
        if not are_valid(requests, responses, self.vocabulary):
            for request, response in zip(requests, responses, strict=True):
                self._check_response(request, response)
        for _ in responses if self.run.clock.is_observed else ():
            self.run.clock.record("engine request", start)
        for request, response in zip(requests, responses, strict=True):
            if response.metrics:
                prefix = "engine" if len(self.engines) == 1 else f"{request.policy}/engine"
                add(self.answers, {f"{prefix}/{name}": (value, 1.0) for name, value in response.metrics.items()})
            if response.finish == "abort" and len(response.tokens) == request.sampling.max_new_tokens:
                response.finish = "length"

    def count_unknown(self, responses: Sequence[Response]) -> None:
        """Count the ids of complete responses that have no token in the tokenizer."""
        if self._without_token is not None:
            tokens = np.asarray(join_columns(response.tokens for response in responses))
            unknown = int(self._without_token[tokens].sum())
            add(self.answers, {"rollout/ids_without_token": (float(unknown), float(len(tokens)))})

    def _continue(self, first: Request, parts: Sequence[Response]) -> Request:
        """Return a request for the rest of a response."""
        generated, sampling = join_columns(part.tokens for part in parts), first.sampling
        if parts:
            sampling = dataclasses.replace(sampling, max_new_tokens=sampling.max_new_tokens - len(generated))
        tokens = first.tokens + generated
        return Request(
            tokens, sampling, first.key, first.group, set(self.extras), policy=first.policy, media=first.media
        )

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


def _has_several_versions(parts: Sequence[Response]) -> bool:
    return len({version for part in parts for _, version in part.weight_versions}) > 1
