import asyncio
import math
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from miles_core.errors import ConfigError, DataError
from miles_core.reward.reward import RewardFunction, make_reward, score

ARGS = SimpleNamespace(reward_key=None)


def samples(*responses, label="yes"):
    return [
        SimpleNamespace(prompt="?", response=r, label=label, metadata={}, reward=None, index=10 + i)
        for i, r in enumerate(responses)
    ]


def custom(function, how="inline"):
    return RewardFunction(function, "mine", "mine.py", how)


def test_rules_by_name():
    batch = samples("yes", "no", None)
    asyncio.run(score(batch, make_reward("exact"), ARGS))
    assert [s.reward for s in batch] == [1.0, 0.0, 0.0]


def test_math_by_name_without_starting_a_process():
    batch = samples(r"\boxed{4}", r"\boxed{5}", label="4")
    asyncio.run(score(batch, make_reward("math"), ARGS))
    assert [s.reward for s in batch] == [1.0, 0.0]


def test_a_custom_file_wins_over_the_type(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("async def reward(args, sample):\n    return len(sample.response) * args.scale\n")
    batch = samples("abc", "")
    asyncio.run(score(batch, make_reward("exact", str(path)), SimpleNamespace(scale=2)))
    assert [s.reward for s in batch] == [6.0, 0.0]


def test_a_plain_function_may_block():
    meet = threading.Barrier(3, timeout=10)

    def function(args, sample):
        meet.wait()
        return 1

    batch = samples("a", "b", "c")
    asyncio.run(score(batch, custom(function, "thread"), ARGS))
    assert [s.reward for s in batch] == [1.0] * 3


def test_concurrency_is_bounded_over_all_callers_and_survives_a_new_loop():
    running, most = 0, 0

    async def function(args, sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return 0.5

    reward = RewardFunction(function, "mine", "mine.py", "async", concurrency=2)

    async def both():
        await asyncio.gather(score(samples(*"abcd"), reward, ARGS), score(samples(*"abcd"), reward, ARGS))

    asyncio.run(both())
    asyncio.run(both())
    assert most == 2


@pytest.mark.parametrize("value", [True, 3, np.float32(0.5), np.int64(2), torch.tensor(0.25)])
def test_numbers_become_floats(value):
    batch = samples("a")
    asyncio.run(score(batch, custom(lambda args, sample: value), ARGS))
    assert type(batch[0].reward) is float
    assert batch[0].reward == float(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "is nan; a reward must be finite"),
        (math.inf, "is inf; a reward must be finite"),
        (None, r"is None \(NoneType\); a reward must be a number"),
        ("1", r"is '1' \(str\)"),
        (torch.zeros(2), "more than one number"),
        (
            {"acc": 1.0, "format": 0.0},
            "is a dict with keys 'acc', 'format'; name the one to train on with --reward-key",
        ),
    ],
)
def test_what_is_no_reward(value, message):
    batch = samples("a", "b")
    with pytest.raises(DataError, match=message) as error:
        asyncio.run(score(batch, custom(lambda args, sample: value if sample.index == 11 else 1.0), ARGS))
    assert "sample 11" in str(error.value)
    assert "mine (mine.py)" in str(error.value)


def test_dict_rewards_keep_their_parts():
    batch = samples("a")
    asyncio.run(score(batch, custom(lambda *_: {"acc": 1, "other": None}), SimpleNamespace(reward_key="acc")))
    assert batch[0].reward == {"acc": 1, "other": None}
    with pytest.raises(DataError, match="without --reward-key 'b'; it has 'acc', 'other'"):
        asyncio.run(score(samples("a"), custom(lambda *_: {"acc": 1, "other": None}), SimpleNamespace(reward_key="b")))


def test_a_reward_that_raises_is_named_and_stops_the_others():
    started = []

    async def function(args, sample):
        started.append(sample.index)
        if sample.index == 10:
            raise KeyError("answer")
        await asyncio.sleep(60)
        return 1.0

    with pytest.raises(DataError, match=r"mine \(mine.py\) raised KeyError on sample 10: 'answer'"):
        asyncio.run(score(samples("a", "b"), custom(function, "async"), ARGS))
    assert started == [10, 11]


def test_a_missing_label_names_sample_and_rule():
    with pytest.raises(DataError, match=r"sample 10, .* exact \(--rm-type exact\): the label is None.*--label-key"):
        asyncio.run(score(samples("a", label=None), make_reward("exact"), ARGS))


def test_a_reward_set_by_a_generate_function_is_kept_and_checked():
    batch = samples("a", "b")
    batch[0].reward = 0.75
    asyncio.run(score(batch, custom(lambda *_: 0.0), ARGS))
    assert [s.reward for s in batch] == [0.75, 0.0]
    batch[0].reward = math.nan
    with pytest.raises(DataError, match="sample 10, from the generate function"):
        asyncio.run(score(batch, custom(lambda *_: 0.0), ARGS))


def test_choices():
    with pytest.raises(ConfigError, match=r"no reward is chosen; give --rm-type .exact"):
        make_reward(None)
    with pytest.raises(ConfigError, match=r"--rm-type maths is not known; choose one of .*math"):
        make_reward("maths")
    with pytest.raises(ConfigError, match="--rm-url"):
        make_reward("remote")
    with pytest.raises(ConfigError, match="concurrency is 0"):
        make_reward("exact", concurrency=0)


def raising(error):
    def function(args, sample):
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda args, sample: next(iter(())), "it raised StopIteration: give next"),
        (lambda args, sample: sys.exit("enough"), r"it called sys.exit\('enough'\)"),
        (raising(asyncio.CancelledError()), "it raised CancelledError; raise an error"),
        (raising(KeyboardInterrupt()), "it raised KeyboardInterrupt; raise an error"),
        (raising(GeneratorExit()), "it raised GeneratorExit; raise an error"),
        (raising(TimeoutError()), "raised TimeoutError on sample 10$"),
        (lambda args, sample: 10**400, "a whole number of hundreds of digits"),
        (lambda args, sample: 1e308, "its square is infinite"),
        (lambda args, sample: sample.tokens.append(3) or 1.0, "changed the tokens of sample 10"),
    ],
    ids=[
        "StopIteration",
        "sys.exit",
        "cancelled",
        "interrupt",
        "generator",
        "nothing said",
        "10**400",
        "1e308",
        "tokens",
    ],
)
def test_what_a_function_must_not_do(function, message):
    batch = samples("yes")
    batch[0].tokens = [1, 2]
    with pytest.raises(DataError, match=message):
        asyncio.run(asyncio.wait_for(score(batch, custom(function, "thread"), ARGS), 20))


@pytest.mark.parametrize(
    ("error", "message"),
    [(SystemExit(3), r"it called sys.exit\(3\)"), (asyncio.CancelledError(), "it raised CancelledError")],
)
def test_what_an_async_function_must_not_do(error, message):
    async def leave(args, sample):
        raise error

    with pytest.raises(DataError, match=f"sample 10.*{message}"):
        asyncio.run(score(samples("yes"), custom(leave, "async"), ARGS))


def test_a_call_that_is_cancelled_from_outside_stays_cancelled():
    async def wait(args, sample):
        await asyncio.sleep(60)

    async def main():
        task = asyncio.ensure_future(custom(wait, "async")(ARGS, samples("yes")[0]))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
