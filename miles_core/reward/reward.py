"""Scoring samples: which function, how many at once, and what counts as a reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from weakref import WeakKeyDictionary

from miles_core.data.reward_value import number
from miles_core.errors import ConfigError, DataError
from miles_core.reward.custom import UserFunction, load_function
from miles_core.reward.math_verifier import MathVerifier
from miles_core.reward.remote import RemoteReward
from miles_core.reward.rules import RULES, Rule

RM_TYPES = (*RULES, "math", "remote")
#: Those that compare a response with a label.
LABELLED = (*RULES, "math")
DEFAULT_CONCURRENCY = 64


class RewardFunction:
    """``function(args, sample)`` gives a number or a dict of numbers; this says how to call it, and how often at once.

    Attributes:
        name, origin: for messages: the function, and the file or flag it comes from.
        how: ``async``, awaited; ``thread``, in a thread because it may block (several calls run at once); ``inline``,
            fast and called directly.
        concurrency: calls at once, over all callers of one event loop.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        name: str,
        origin: str,
        how: Literal["async", "thread", "inline"],
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"reward concurrency is {concurrency}; at least one call must be allowed")
        self.function, self.name, self.origin, self.how, self.concurrency = function, name, origin, how, concurrency
        if how != "inline" and not isinstance(function, UserFunction):
            self.function = UserFunction(function, name, origin, how == "async")
        # Threads start when needed. The default executor has only a few of them, too few for calls that wait.
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="reward") if how == "thread" else None
        self._limits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def __call__(self, args: Any, sample: Any) -> Any:
        if self.how == "inline":
            return self.function(args, sample)
        loop = asyncio.get_running_loop()
        async with self._limits.setdefault(loop, asyncio.Semaphore(self.concurrency)):
            if self._pool is not None:
                return await loop.run_in_executor(self._pool, self.function, args, sample)
            return await self.function(args, sample)


def make_reward(
    rm_type: str | None,
    custom_path: str | None = None,
    rm_url: str | None = None,
    concurrency: int = DEFAULT_CONCURRENCY,
) -> RewardFunction:
    """The reward of a run: ``--custom-rm-path`` if given, else ``--rm-type``.

    A custom function is ``async reward(args, sample) -> float | dict``, or the same without ``async``: then it runs in
    threads and must allow several calls at once.

    Raises:
        ConfigError: neither is given, or it cannot be loaded.
    """
    if custom_path is not None:
        function = load_function(custom_path, flag="--custom-rm-path", default="reward", parameters=("args", "sample"))
        how: Literal["async", "thread"] = "async" if function.is_async else "thread"
        return RewardFunction(function, function.name, function.origin, how, concurrency)
    if rm_type in RULES:
        return RewardFunction(_on_sample(RULES[rm_type]), rm_type, f"--rm-type {rm_type}", "inline", concurrency)
    if rm_type == "math":
        return RewardFunction(_on_sample(MathVerifier()), "math", "--rm-type math", "thread", concurrency)
    if rm_type == "remote":
        return RewardFunction(RemoteReward(rm_url), "remote", f"--rm-url {rm_url}", "thread", concurrency)
    choices = ", ".join(RM_TYPES)
    if rm_type is None:
        raise ConfigError(f"no reward is chosen; give --rm-type ({choices}) or --custom-rm-path f.py[:function]")
    raise ConfigError(f"--rm-type {rm_type} is not known; choose one of {choices}, or give --custom-rm-path")


async def score(samples: Iterable[Any], reward: RewardFunction, args: Any) -> None:
    """Set ``sample.reward`` of every sample that has none yet, and check it in all of them.

    A number is stored as a float; a dict stays a dict and must hold ``args.reward_key``. The first failure cancels the
    calls that are still waiting.

    Args:
        samples: with attributes ``response, label, metadata, reward, index, prompt``.
        reward: what ``make_reward`` returned.
        args: passed to the reward function.

    Raises:
        DataError: the function raised, or returned something that is not a finite number; names the sample, the
            value, the function and its file.
    """
    reward_key = getattr(args, "reward_key", None)
    tasks = [asyncio.ensure_future(_score_one(sample, reward, args, reward_key)) for sample in samples]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _score_one(sample: Any, reward: RewardFunction, args: Any, reward_key: str | None) -> None:
    who = f"the reward function {reward.name} ({reward.origin})"
    value = sample.reward
    tokens = list(getattr(sample, "tokens", ()))
    if value is None:
        try:
            value = await reward(args, sample)
        except DataError as error:
            raise DataError(f"sample {sample.index}, scored by {who}: {error}") from error
        except Exception as error:
            text = f": {error}" if str(error) else ""
            raise DataError(f"{who} raised {type(error).__name__} on sample {sample.index}{text}") from error
    else:
        who = "the generate function that set it"
    if list(getattr(sample, "tokens", ())) != tokens:
        raise DataError(
            f"{who} changed the tokens of sample {sample.index}, which the engine's log-probs belong to; copy them first"
        )
    try:
        checked = number(value, reward_key)
    except DataError as error:
        raise DataError(f"the reward of sample {sample.index}, from {who}, {error}") from error
    sample.reward = value if isinstance(value, dict) else checked


def _on_sample(rule: Rule) -> Callable[[Any, Any], float]:
    def reward(args: Any, sample: Any) -> float:
        return rule(sample.response, sample.label)

    return reward
