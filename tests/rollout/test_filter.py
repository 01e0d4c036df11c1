from types import SimpleNamespace

import pytest

from miles_core.errors import ConfigError, DataError
from miles_core.rollout.filter import load_filter, nonzero_std

ARGS = SimpleNamespace(reward_key=None)


def group(*rewards):
    return [SimpleNamespace(reward=r, index=i, group_index=3) for i, r in enumerate(rewards)]


def test_nonzero_std_drops_groups_with_equal_rewards():
    assert nonzero_std(ARGS, group(0.0, 1.0))
    assert not nonzero_std(ARGS, group(0.1, 0.1, 0.1))
    assert not nonzero_std(ARGS, group(1.0))


def test_nonzero_std_follows_the_reward_key():
    samples = group({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.0})
    assert not nonzero_std(SimpleNamespace(reward_key="a"), samples)
    assert nonzero_std(SimpleNamespace(reward_key="b"), samples)
    with pytest.raises(DataError, match=r"sample 0 .*'a', 'b'.*--reward-key"):
        nonzero_std(ARGS, samples)


def test_by_name_and_from_a_file(tmp_path):
    assert load_filter("nonzero_std") is nonzero_std
    file = tmp_path / "mine.py"
    file.write_text("def keep(args, samples):\n    return len(samples) > 1\ndef other(args, samples):\n    return 3\n")
    assert load_filter(str(file))(ARGS, group(1.0, 2.0)) is True
    assert load_filter(str(file))(ARGS, group(1.0)) is False
    with pytest.raises(DataError, match=r"other .*mine.py.* returned 3 for group 3"):
        load_filter(f"{file}:other")(ARGS, group(1.0))


def test_a_filter_that_raises_is_named(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def keep(args, samples):\n    return samples[7]\n")
    with pytest.raises(DataError, match=r"keep .*bad.py.* raised IndexError on group 3"):
        load_filter(str(file))(ARGS, group(1.0))


def test_what_is_no_filter(tmp_path):
    with pytest.raises(ConfigError, match="nonzero_std"):
        load_filter("nonzero")
    file = tmp_path / "coro.py"
    file.write_text("async def keep(args, samples):\n    return True\n")
    with pytest.raises(ConfigError, match="is async"):
        load_filter(str(file))
