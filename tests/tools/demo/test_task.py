import json
import random

import pytest

from miles_tools.demo.task import careless_sum, split_pairs, write_task


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_labels_are_sums_and_held_out_pairs_are_not_trained_on(tmp_path):
    files = write_task(tmp_path, seed=3, held_out=200, demonstrations=500)
    train, held_out = rows(files.train), rows(files.held_out)
    for row in train + held_out:
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(a) + int(b) == int(row["label"])

    def pair(row):
        return frozenset(row["prompt"].rstrip("=").split("+"))

    assert len(held_out) == 200
    assert not {pair(r) for r in train} & {pair(r) for r in held_out}
    assert not {pair(r) for r in rows(files.demonstrations)} & {pair(r) for r in held_out}


def test_train_and_held_out_cover_every_pair_once():
    train, held_out = split_pairs(100, random.Random(0))
    assert len(set(train)) == len(train)
    assert {frozenset(p) for p in train + held_out} == {
        frozenset((a, b)) for a in range(10, 100) for b in range(10, 100)
    }


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    a, b, c = (
        write_task(tmp_path / name, seed=seed, demonstrations=50) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert a.train.read_bytes() == b.train.read_bytes()
    assert a.demonstrations.read_bytes() == b.demonstrations.read_bytes()
    assert a.held_out.read_bytes() != c.held_out.read_bytes()


@pytest.mark.parametrize(("forgets", "expected"), [(0.0, "101"), (1.0, "91")])
def test_a_teacher_who_forgets_carries(forgets, expected):
    assert careless_sum(58, 43, forgets, random.Random(0)) == expected


def test_a_teacher_who_always_forgets_drops_the_hundred():
    assert careless_sum(70, 50, 1.0, random.Random(0)) == "20"
    assert careless_sum(12, 34, 1.0, random.Random(0)) == "46"


@pytest.mark.parametrize("count", [0, 4095])
def test_impossible_split_names_the_range(count):
    with pytest.raises(ValueError, match="between 1 and 4094"):
        split_pairs(count, random.Random(0))
