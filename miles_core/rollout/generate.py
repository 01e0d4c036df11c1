"""Generating one sample: a single turn, or a user's own function.

A custom function is ``async generate(args, sample, sampling_params) -> Sample | list[Sample]``. ``args`` reads like the
command line's flat namespace and ``await args.generate(tokens, sampling_params)`` asks the engine; it works on every engine, lets
plugins see the request, and records log-probabilities and declared fields call by call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.data.sample import Sample, Status
from miles_core.errors import ConfigError, DataError
from miles_core.reward.custom import load_function
from miles_core.rollout.record import Record

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.run import Run

Generate = Callable[[Sample], Awaitable[list[Sample]]]


class Args:
    """The flat option namespace plus ``generate``, made anew for every sample."""

    def __init__(self, options: Any, generate: Callable[..., Awaitable[Response]]) -> None:
        self._options = options
        self.generate = generate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._options, name)


class Generator:
    """Turns a pending sample into finished ones.

    Args:
        run: for hooks, fields and configuration.
        engine: where requests go.
        sampling: the default sampling parameters.
        custom: the user's function, or None for one turn.
    """

    def __init__(self, run: Run, engine: Engine, sampling: Sampling, custom: Callable[..., Any] | None = None) -> None:
        self.run, self.engine, self.sampling, self.custom = run, engine, sampling, custom
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
            one.validate(self.run.fields)
            if one.status not in (Status.ABORTED, Status.FAILED):
                self.run.hooks.on("on_sample", run=self.run, sample=one)
        return samples

    async def ask(self, sample: Sample, record: Record, tokens: list[int], sampling: Sampling) -> Response:
        """One engine call for ``sample``; plugins see the request first."""
        request = Request(list(tokens), sampling, key=sample.index, group=sample.group_index, extras=set(self.extras))
        self.run.hooks.on("on_request", run=self.run, request=request)
        response = await self.engine.generate(request)
        record.add(tokens, response)
        return response

    async def _single_turn(self, sample: Sample, record: Record) -> Sample:
        prompt = list(sample.tokens)
        response = await self.ask(sample, record, prompt, self.sampling)
        sample.tokens = prompt + response.tokens
        sample.response_length = len(response.tokens)
        sample.response = response.text
        return sample

    async def _custom(self, sample: Sample, record: Record) -> list[Sample]:
        assert self.custom is not None

        async def ask(tokens: list[int], sampling_params: Any = None) -> Response:
            return await self.ask(sample, record, tokens, self._sampling(sampling_params))

        made = await self.custom(Args(self.run.config.args, ask), sample, dataclasses.asdict(self.sampling))
        samples = made if isinstance(made, list) else [made]
        where = self.run.config.rollout.custom_generate_function_path
        if not samples or not all(isinstance(s, Sample) for s in samples):
            raise DataError(
                f"{where} returned {type(made).__name__} for sample {sample.index}; return a Sample or a list of them"
            )
        for one in samples:
            one.group_index = sample.group_index
            one.rollout_id = sample.index
        return samples

    def _sampling(self, params: Any) -> Sampling:
        if params is None:
            return self.sampling
        if isinstance(params, Sampling):
            return params
        if not isinstance(params, Mapping):
            raise DataError(f"sampling_params must be a mapping, got {type(params).__name__}")
        known = {f.name for f in dataclasses.fields(Sampling)}
        unknown = sorted(set(params) - known)
        if unknown:
            raise DataError(f"sampling_params has no {unknown[0]!r}; it takes {', '.join(sorted(known))}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in params.items()}
        return dataclasses.replace(self.sampling, **values)


def load_generate(spec: str) -> Callable[..., Any]:
    """The function of ``--custom-generate-function-path``; ConfigError when it cannot be loaded or is not async."""
    flag = "--custom-generate-function-path"
    function = load_function(spec, flag=flag, default="generate", parameters=("args", "sample", "sampling_params"))
    if not function.is_async:
        raise ConfigError(
            f"{flag} {spec}: {function.name} must be async (async def {function.name}(args, sample, sampling_params))"
        )
    return function
