import asyncio
import math
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from miles_core.errors import ConfigError, DataError
from miles_core.reward.reward import RewardFunction, group_reward, load_reward, score

ARGS = SimpleNamespace(reward_key=None)


def samples(*responses, label="yes"):
    return [
        SimpleNamespace(prompt="?", response=r, label=label, metadata={}, reward=None, index=10 + i)
        for i, r in enumerate(responses)
    ]


def custom(function, how="thread"):
    return RewardFunction(function, "mine", "mine.py", how)


def test_a_custom_file_is_loaded(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("async def reward(args, sample):\n    return len(sample.response) * args.scale\n")
    batch = samples("abc", "")
    asyncio.run(score(batch, load_reward(str(path)), SimpleNamespace(scale=2)))
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


def test_a_reward_set_by_a_generate_function_is_kept_and_checked():
    batch = samples("a", "b")
    batch[0].reward = 0.75
    asyncio.run(score(batch, custom(lambda *_: 0.0), ARGS))
    assert [s.reward for s in batch] == [0.75, 0.0]
    batch[0].reward = math.nan
    with pytest.raises(DataError, match="sample 10, from the generate function"):
        asyncio.run(score(batch, custom(lambda *_: 0.0), ARGS))


def test_a_reward_needs_at_least_one_call_at_a_time(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("async def reward(args, sample):\n    return 1\n")
    with pytest.raises(ConfigError, match="concurrency is 0"):
        load_reward(str(path), concurrency=0)


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
        (raising(TimeoutError()), "raised TimeoutError on sample 10 \(test_reward.py:\d+\)$"),
        (lambda args, sample: 10**400, "an integer with hundreds of digits"),
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


def in_group(function, how="thread"):
    return RewardFunction(group_reward(function), "rank", "rank.py", how)


def test_a_group_reward_is_called_once_with_the_whole_group():
    calls = []

    async def ranks(args, samples):
        calls.append([s.response for s in samples])
        lengths = sorted(len(s.response) for s in samples)
        return np.array([lengths.index(len(s.response)) for s in samples])

    batch = samples("ccc", "a", "bb")
    asyncio.run(score(batch, in_group(ranks, "async"), ARGS))
    assert calls == [["ccc", "a", "bb"]] and [s.reward for s in batch] == [2.0, 0.0, 1.0]
    assert all(type(s.reward) is float for s in batch)


def test_a_group_reward_keeps_rewards_that_a_generate_function_set():
    batch = samples("a", "b")
    batch[0].reward = 7
    asyncio.run(score(batch, in_group(lambda args, group: [{"x": 1.0}] * len(group)), SimpleNamespace(reward_key="x")))
    assert batch[0].reward == 7.0 and batch[1].reward == {"x": 1.0}
    asyncio.run(score(batch, in_group(lambda args, group: 1 / 0), SimpleNamespace(reward_key="x")))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "returned 1 rewards for the group of sample 10, which has 2 samples"),
        (0.5, "returned 0.5 for the group of sample 10, which has 2 samples; a group reward returns a list"),
        ("ab", "returned 'ab' for the group"),
        ([1.0, math.nan], r"the reward of sample 11, from the reward function rank \(rank.py\), is nan"),
    ],
)
def test_what_a_group_reward_must_not_return(value, message):
    with pytest.raises(DataError, match=message):
        asyncio.run(score(samples("a", "b"), in_group(lambda args, group: value), ARGS))


def test_a_group_reward_that_raises_or_changes_tokens_is_named():
    with pytest.raises(DataError, match=r"rank \(rank.py\) raised ZeroDivisionError on the group of sample 10"):
        asyncio.run(score(samples("a", "b"), in_group(lambda args, group: 1 / 0), ARGS))
    batch = samples("a", "b")
    for sample in batch:
        sample.tokens = [1, 2]

    def change(args, group):
        group[1].tokens.append(3)
        return [0, 0]

    with pytest.raises(DataError, match="changed the tokens of sample 11"):
        asyncio.run(score(batch, in_group(change), ARGS))


def test_an_unknown_scope_is_refused():
    def function(args, sample):
        return 1.0

    function.scope = "batch"
    with pytest.raises(ConfigError, match=r"mine \(mine.py\) declares the scope 'batch'; a reward's scope is"):
        custom(function)


@pytest.mark.parametrize("plain", [True, False])
def test_group_rewards_and_their_concurrency_in_a_run(toy_run, tmp_path, plain):
    """Training and evaluation call the function with whole groups, at most ``--reward-concurrency`` at once."""
    (tmp_path / "rank.py").write_text(
        "import asyncio, time\nfrom miles_core.plugin import group_reward\n\nrunning, most, sizes = 0, 0, []\n\n"
        "@group_reward\n" + ("" if plain else "async ") + "def reward(args, samples):\n    global running, most\n"
        "    running += 1\n    most = max(most, running)\n    sizes.append(len(samples))\n"
        + ("    time.sleep(0.01)\n" if plain else "    await asyncio.sleep(0.01)\n")
        + "    running -= 1\n    best = max(sum(s.tokens) for s in samples)\n"
        "    return [float(sum(s.tokens) == best) for s in samples]\n"
    )
    path = tmp_path / "rank.py"
    prompts = tmp_path / "held.jsonl"
    prompts.write_text('{"input": "a"}\n{"input": "b"}\n')
    done = toy_run(
        steps=1,
        custom_rm_path=path,
        reward_concurrency=2,
        rollout_batch_size=4,
        eval_prompt_data=prompts,
        eval_interval=1,
        n_samples_per_eval_prompt=3,
    )
    module = next(
        m for name, m in sys.modules.items() if name.startswith("miles_user_rank") and m.__file__ == str(path)
    )
    assert sorted(module.sizes) == [3, 3, 3, 3, 4, 4, 4, 4] and module.most == 2
    assert done.metrics[-1]["reward/max"] == 1.0 and 0 < done.metrics[-1]["reward/mean"] < 1


@pytest.mark.parametrize("rm_type", ["exact", "boxed", "f1", "math"])
def test_a_key_into_a_reward_that_is_a_number_is_refused_in_the_plan(rm_type):
    from miles_testing import plan

    options = {"rm_type": rm_type, "custom_rm_path": None, "label_key": "label"}
    with pytest.raises(ConfigError, match=f"^--reward-key score: it needs .*, and --rm-type is {rm_type} "):
        plan(reward_key="score", **options)
    assert plan(**options)


def test_a_key_into_a_reward_of_a_plugin_or_a_file_that_is_a_number_is_refused_at_the_start(tmp_path):
    from miles_testing import toy_run

    (tmp_path / "r.py").write_text("async def reward(args, sample) -> float:\n    return 1.0\n")
    (tmp_path / "own.py").write_text(
        "from miles_core.plugin import Plugin, compares_label\n"
        "plugin = Plugin('own', 'a reward', '0', '~=0.1', provides={'reward': {'own': 'own:make'}})\n"
        "make = compares_label(lambda: None)\n"
    )
    rewards = (
        ((), {"custom_rm_path": f"{tmp_path / 'r.py'}:reward"}),
        ([str(tmp_path / "own.py")], {"rm_type": "own", "custom_rm_path": None, "label_key": "label"}),
    )
    for plugins, options in rewards:
        with pytest.raises(ConfigError, match="--reward-key score: it has no effect, because the reward of"):
            toy_run(plugins, reward_key="score", **options)
