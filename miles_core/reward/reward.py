"""Scores samples with the run's reward function: limits concurrent calls and validates the rewards."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

from miles_core.data.sample import number
from miles_core.errors import ConfigError, DataError
from miles_core.reward.custom import UserFunction, load_function
from miles_core.reward.threads import DaemonThreads
from miles_core.text import describe_error, describe_notes, valid_data

log = logging.getLogger(__name__)
DEFAULT_CONCURRENCY = 64
#: Seconds after which a call is reported, once per run.
SLOW = 60.0

#: What a reward function receives: one sample, or all samples of one prompt.
Scope = Literal["sample", "group"]
F = TypeVar("F", bound=Callable[..., Any])


def group_reward(function: F) -> F:
    """Declare that a reward function scores whole groups: ``function(args, samples)`` returns one reward per sample, in order.

    ``samples`` are all samples of one prompt, of every policy, except those that failed.
    """
    function.scope = "group"  # type: ignore[attr-defined]
    return function


def check_label(label: Any) -> None:
    """Check that a label holds an answer.

    Raises:
        DataError: it is empty, or a mapping.
    """
    held = list(label) if isinstance(label, (list, tuple)) else [label]
    if all(item is None or not str(item).strip() for item in held):
        raise DataError(f"the label is {label!r}, so there is nothing to compare with; check --label-key and the data")
    if found := next((item for item in held if isinstance(item, Mapping)), None):
        entries = ", ".join(map(repr, found))
        raise DataError(
            f"the label is {label!r:.80}, a mapping with the entries {entries}; name the one with the answer, as in --label-key KEY.ENTRY"
        )


def compares_label(build: F, check: Callable[[Any], object] = check_label) -> F:
    """Declare that the reward created by ``build`` compares a response with a label and is a number: a run without labels, or with
    ``--reward-key``, is rejected before it starts.

    ``build`` is the provider that a manifest names under the kind ``reward``. ``check`` is called with the label of every row, and raises
    DataError if no response can match it.
    """
    build.check_label = check  # type: ignore[attr-defined]
    return build


class RewardFunction:
    """A reward function with the way to call it and a limit on concurrent calls.

    A function with the scope ``sample`` is called as ``function(args, sample)`` and returns a number or a dict of numbers. One
    with the scope ``group`` is called as ``function(args, samples)`` and returns a sequence of those.

    Attributes:
        name, origin: name of the function, and its file or flag, for messages.
        how: ``async``: awaited; ``thread``: called in threads, because it may block (several calls run concurrently).
        concurrency: maximum number of concurrent calls in an event loop.
        scope: the declared scope, from ``group_reward`` or the function's attribute ``scope``.
        rule: the function's attribute ``rule``, ``rule(response, label) -> float``: computes the same reward without waiting; None if it has none.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        name: str,
        origin: str,
        how: Literal["async", "thread"],
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"reward concurrency is {concurrency}; at least one call must be allowed")
        self.function, self.name, self.origin, self.how, self.concurrency = function, name, origin, how, concurrency
        self.scope = _scope(function, f"the reward function {name} ({origin})")
        self.rule: Callable[[str, Any], float] | None = getattr(function, "rule", None)
        if not isinstance(function, UserFunction):
            self.function = UserFunction(function, name, origin, how == "async")
        self._threads = DaemonThreads(concurrency, "reward") if how == "thread" else None
        self._reported = False
        self._limits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def __call__(self, args: Any, scored: Any) -> Any:
        own = Namespace()  # the function may change its options
        own.__dict__.update(vars(args))
        loop = asyncio.get_running_loop()
        limit = self._limits.get(loop) or self._limits.setdefault(loop, asyncio.Semaphore(self.concurrency))
        async with limit:
            slow = loop.call_later(SLOW, self._report_slow, scored)
            try:
                if self._threads is not None:
                    return await self._threads.call(self.function, own, scored)
                return await self.function(own, scored)
            finally:
                slow.cancel()

    def _report_slow(self, scored: Any) -> None:
        """Name the first call that takes longer than SLOW: without this, a run whose reward never returns would wait in silence."""
        if not self._reported:
            self._reported = True
            first = scored[0] if isinstance(scored, list) else scored
            what = f"the group of sample {first.index}" if isinstance(scored, list) else f"sample {first.index}"
            text = "%s has not returned after %g s on %s; the step waits for it. If it may never return, give it a time limit"
            log.warning(text, _who(self), SLOW, what)


def _scope(function: Any, who: str) -> Scope:
    declared = getattr(function.function if isinstance(function, UserFunction) else function, "scope", "sample")
    if declared not in ("sample", "group"):
        raise ConfigError(f"{who} declares the scope {declared!r:.80}; a reward's scope is 'sample' or 'group'")
    return cast(Scope, declared)


def load_reward(path: str, concurrency: int = DEFAULT_CONCURRENCY) -> RewardFunction:
    """Load the reward function of ``--custom-rm-path``.

    The function is ``async reward(args, sample) -> float | dict``. Without ``async``, it runs in threads and must be
    thread-safe. With ``group_reward`` it scores whole groups.

    Raises:
        ConfigError: the function cannot be loaded.
    """
    function = load_function(path, flag="--custom-rm-path", default="reward", parameters=("args", "sample"))
    how: Literal["async", "thread"] = "async" if function.is_async else "thread"
    return RewardFunction(function, function.name, function.origin, how, concurrency)


async def score(samples: Iterable[Any], reward: RewardFunction, args: Any) -> None:
    """Set the reward of every sample of a group that has none yet, and validate the rewards of all samples.

    A number is stored as a float; a dict stays a dict and must hold ``args.reward_key``. The first failure cancels the
    calls that are still waiting. A function with the scope ``group`` is called once, unless every sample has a reward.

    Args:
        samples: samples of one group, with attributes ``response, label, metadata, reward, index, prompt``.
        reward: the run's reward function.
        args: first argument of the reward function.

    Raises:
        DataError: the function raised, or returned something that is not a finite number for each sample; names the
            sample, the value, the function and its file.
    """
    samples = list(samples)
    if reward.scope == "group":
        await _score_group(samples, reward, args)
        return
    if reward.rule is not None:
        apply_rule(samples, reward, args)
        return
    if len(samples) == 1:
        await _score_one(samples[0], reward, args)
        return
    tasks = [asyncio.ensure_future(_score_one(sample, reward, args)) for sample in samples]
    try:
        await asyncio.gather(*tasks)
    finally:
        if left := [task for task in tasks if task.cancel()]:  # those that are not done
            await asyncio.gather(*left, return_exceptions=True)


def apply_rule(samples: Iterable[Any], reward: RewardFunction, args: Any) -> None:
    """Set and validate rewards as ``score`` does, with the function's ``rule``, which waits for nothing."""
    assert reward.rule is not None
    who, key = _who(reward), _key(args)
    for sample in samples:
        if sample.reward is not None:
            _keep(sample, sample.reward, _PRESET, key)
            continue
        try:
            value = reward.rule(sample.response, sample.label)
        except Exception as error:
            raise _failure(reward, error, f"sample {sample.index}") from error
        _keep(sample, value, who, key)


async def _score_one(sample: Any, reward: RewardFunction, args: Any) -> None:
    if sample.reward is not None:
        _keep(sample, sample.reward, _PRESET, _key(args))
        return
    value = await _call(reward, args, sample, [sample], f"sample {sample.index}")
    _keep(sample, value, _who(reward), _key(args))


async def _score_group(samples: list[Any], reward: RewardFunction, args: Any) -> None:
    missing = [sample for sample in samples if sample.reward is None]
    if missing:
        group = f"the group of sample {samples[0].index}"
        values = await _call(reward, args, list(samples), samples, group)
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(samples):
            got = f"{len(values)} rewards" if isinstance(values, (list, tuple)) else f"{values!r:.80}"
            raise DataError(
                f"{_who(reward)} returned {got} for {group}, which has {len(samples)} samples; a group reward returns a list "
                "with one reward per sample"
            )
    for i, sample in enumerate(samples):
        if sample.reward is None:
            _keep(sample, values[i], _who(reward), _key(args))
        else:
            _keep(sample, sample.reward, _PRESET, _key(args))


def _key(args: Any) -> str | None:
    return getattr(args, "reward_key", None)


_PRESET = "the generate function that set it"


def _who(reward: RewardFunction) -> str:
    return f"the reward function {reward.name} ({reward.origin})"


async def _call(reward: RewardFunction, args: Any, scored: Any, samples: list[Any], what: str) -> Any:
    """Call the function with ``scored``, which contains ``samples``; DataError if it raises or changes their tokens."""
    tokens = [getattr(sample, "tokens", ())[:] for sample in samples]
    try:
        value = await reward(args, scored)
    except Exception as error:
        raise _failure(reward, error, what) from error
    for sample, before in zip(samples, tokens, strict=True):
        if getattr(sample, "tokens", ()) != before:
            raise DataError(
                f"{_who(reward)} changed the tokens of sample {sample.index}, to which the engine's log-probs belong; copy "
                "them first"
            )
    return value


def _failure(reward: RewardFunction, error: Exception, what: str) -> DataError:
    """Return the error to raise for one that a reward function raised on ``what``."""
    if isinstance(error, DataError):
        return DataError(f"{what}, scored by {_who(reward)}: {error}")
    name, _, message = describe_error(error).partition(": ")
    text = (f": {message}" if message else "") + describe_notes(error)
    return DataError(f"{_who(reward)} raised {name} on {what}{text}")


def _keep(sample: Any, value: Any, who: str, reward_key: str | None) -> None:
    try:
        checked = number(value, reward_key)
    except DataError as error:
        raise DataError(f"the reward of sample {sample.index}, from {who}, {error}") from error
    sample.reward = valid_data(value) if isinstance(value, dict) else checked
