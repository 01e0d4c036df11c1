"""``--custom-generate-function-path``: adapts a function in a user's file to a rollout function.

The function is ``async generate(args, sample, sampling_params) -> Sample | list[Sample]``. The attributes of ``args`` are the
options of the command line; ``await args.generate(tokens, sampling_params)`` sends a request to the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from miles_core.contracts.engine import Response
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError, DataError
from miles_core.reward.custom import load_function
from miles_core.rollout.function import GenerationClient, RolloutFunction


class Args:
    """The flat option namespace plus ``generate``, ``ask`` and the model's ``tokenizer``. Each sample has its own instance."""

    def __init__(self, options: Any, ask: GenerationClient) -> None:
        self._options, self.ask = options, ask
        self.tokenizer = ask.tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._options, name)

    def generate(self, tokens: list[int], sampling_params: Any = None, policy: str = "") -> Awaitable[Response]:
        """Request a response to ``tokens``; await the result. ``sampling_params`` overrides entries of the run's parameters."""
        if isinstance(tokens, str):
            raise DataError("args.generate takes token ids, not text: args.tokenizer.encode(text)")
        answer = self.ask(tokens, sampling=sampling_params, policy=policy)

        async def response() -> Response:
            return (await answer).response

        return response()


class CustomGenerate(RolloutFunction):
    """Rollout function that calls a user's function.

    Args:
        function: has the signature given in the module's docstring.
        options: the flat option namespace.
    """

    def __init__(self, function: Callable[..., Any], options: Any) -> None:
        self.function, self.options = function, options

    async def __call__(self, sample: Sample, ask: GenerationClient) -> Any:
        return await self.function(Args(self.options, ask), sample, dataclasses.asdict(ask.sampling))


def load_generate(spec: str) -> Callable[..., Any]:
    """Load the function of ``--custom-generate-function-path``.

    Raises:
        ConfigError: the function cannot be loaded or is not async.
    """
    flag = "--custom-generate-function-path"
    function = load_function(spec, flag=flag, default="generate", parameters=("args", "sample", "sampling_params"))
    if not function.is_async:
        raise ConfigError(
            f"{flag} {spec}: {function.name} must be async (async def {function.name}(args, sample, sampling_params))"
        )
    return function
