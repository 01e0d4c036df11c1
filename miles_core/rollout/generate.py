"""Generating one sample: a single turn, or a user's own function.

A custom function is ``async generate(args, sample, sampling_params) -> Sample | list[Sample]``. ``args`` reads like the
command line's flat namespace and ``await args.generate(tokens, sampling_params)`` asks the engine; it works on every engine, lets
plugins see the request, and records log-probabilities and declared fields call by call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.data.means import add
from miles_core.data.sample import Sample, Status
from miles_core.errors import ConfigError, DataError, MilesError
from miles_core.reward.custom import load_function, said
from miles_core.rollout.continuation import cut_at_stop, joined, usable
from miles_core.rollout.generated import check_samples, sampling_of
from miles_core.rollout.partial import partial_rollout
from miles_core.rollout.record import Record
from miles_core.rollout.versions import mask_older

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.run import Run

Generate = Callable[[Sample], Awaitable[list[Sample]]]

#: Answers in a row from which a request cannot go on, before the run gives up.
FRUITLESS = 100


class Args:
    """The flat option namespace plus ``generate`` and the model's ``tokenizer``, made anew for every sample."""

    def __init__(self, options: Any, generate: Callable[..., Awaitable[Response]], tokenizer: Any) -> None:
        self._options = options
        self.generate, self.tokenizer = generate, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._options, name)


class Generator:
    """Turns a pending sample into finished ones.

    Args:
        run: for hooks, fields and configuration.
        engine: where requests go.
        sampling: the default sampling parameters.
        custom: the user's function, or None for one turn.
        answers: takes what the engine says about each request (``Response.metrics``).
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        sampling: Sampling,
        custom: Callable[..., Any] | None = None,
        answers: dict[str, tuple[float, float]] | None = None,
    ) -> None:
        self.run, self.engine, self.sampling, self.custom = run, engine, sampling, custom
        self.answers = {} if answers is None else answers
        extras = {"sampling_support"} if sampling.truncated and not run.config.rollout.full_vocab_logprobs else set()
        self.extras = extras

    async def __call__(self, sample: Sample) -> list[Sample]:
        """Generate; every returned sample is validated and has been shown to ``on_sample``."""
        record = Record()
        if self.custom is None:
            samples = [await self._single_turn(sample, record)]
        else:
            samples = await self._custom(sample, record)
        for one in samples:
            record.finish(one, self.run.fields)
            if self.run.config.rollout.mask_offpolicy_in_partial_rollout:
                mask_older(one)
            one.validate(self.run.fields)
            if one.status not in (Status.ABORTED, Status.FAILED):
                self.run.hooks.on("on_sample", run=self.run, sample=one)
        return samples

    async def ask(self, sample: Sample, record: Record, tokens: list[int], sampling: Sampling) -> Response:
        """One response for ``sample``, whole also where the engine aborts it: what came back stays, and a further request
        goes on behind it. With ``--partial-rollout`` it may go on under new weights; else a response comes from one version,
        and a request whose weights changed starts again. Plugins see every request first."""
        parts: list[Response] = []
        fruitless = 0
        while fruitless < FRUITLESS:
            known = [token for part in parts for token in part.tokens]
            rest = dataclasses.replace(sampling, max_new_tokens=sampling.max_new_tokens - len(known))
            response, request = await self._request(sample, [*tokens, *known], rest if known else sampling)
            if response.finish == "abort" and len(response.tokens) == request.sampling.max_new_tokens:
                response.finish = "length"
            if response.finish == "abort" and not usable(response, request):
                fruitless += 1
                continue
            parts.append(response)
            cut_at_stop(parts, sampling.stop, self.run.fields, self._decode)
            mixed = len({version for part in parts for _, version in part.weight_versions}) > 1
            if mixed and not partial_rollout(self.run.config):
                parts.clear()
                fruitless += 1
            elif parts[-1].finish != "abort":
                return self._recorded(record, tokens, parts, sampling.stop)
            else:
                fruitless = 0
        raise MilesError(
            f"the engine aborted the request of sample {sample.index} {FRUITLESS} times in a row without a token to go on from; "
            "look at its own log"
        )

    async def _request(self, sample: Sample, tokens: list[int], sampling: Sampling) -> tuple[Response, Request]:
        request = Request(tokens, sampling, key=sample.index, group=sample.group_index, extras=set(self.extras))
        self.run.hooks.on("on_request", run=self.run, request=request)
        response = await self.engine.generate(request)
        add(self.answers, {name: (value, 1.0) for name, value in response.metrics.items()})
        return response, request

    def _recorded(self, record: Record, tokens: list[int], parts: list[Response], stop: tuple[str, ...]) -> Response:
        """Keep every part for the sample; the whole response."""
        so_far = list(tokens)
        for part in parts:
            record.add(so_far, part)
            so_far += part.tokens
        return joined(parts, stop, self.run.fields, self._decode)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.run.tokenizer.decode(tokens, skip_special_tokens=True))

    async def _single_turn(self, sample: Sample, record: Record) -> Sample:
        prompt = list(sample.tokens)
        response = await self.ask(sample, record, prompt, self.sampling)
        sample.tokens = prompt + response.tokens
        sample.response_length = len(response.tokens)
        sample.response = response.text
        return sample

    async def _custom(self, sample: Sample, record: Record) -> list[Sample]:
        assert self.custom is not None

        failures: list[Exception] = []

        async def ask(tokens: list[int], sampling_params: Any = None) -> Response:
            try:
                if isinstance(tokens, str):
                    raise DataError("args.generate takes token ids, not text: args.tokenizer.encode(text)")
                return await self.ask(sample, record, tokens, sampling_of(sampling_params, self.sampling))
            except Exception as error:
                failures.append(error)
                raise

        where = str(self.run.config.rollout.custom_generate_function_path)
        try:
            made = await self.custom(
                Args(self.run.config.args, ask, self.run.tokenizer), sample, dataclasses.asdict(self.sampling)
            )
        except DataError as error:
            raise DataError(f"{where}, on sample {sample.index}: {error}") from error
        except Exception as error:
            if any(error is each for each in failures):  # the engine's, and not the function's
                raise
            raise DataError(f"{where}, on sample {sample.index}: it raised {said(error)}") from error
        vocabulary = int(self.run.plan.fact("model.vocab_size") or len(self.run.tokenizer))
        samples = check_samples(made, sample.index, where, vocabulary)
        for one in samples:
            one.group_index = sample.group_index
            one.rollout_id = sample.index
        return samples


def load_generate(spec: str) -> Callable[..., Any]:
    """The function of ``--custom-generate-function-path``; ConfigError when it cannot be loaded or is not async."""
    flag = "--custom-generate-function-path"
    function = load_function(spec, flag=flag, default="generate", parameters=("args", "sample", "sampling_params"))
    if not function.is_async:
        raise ConfigError(
            f"{flag} {spec}: {function.name} must be async (async def {function.name}(args, sample, sampling_params))"
        )
    return function
