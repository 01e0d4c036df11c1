import json
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.checkpoint.store import Store
from miles_core.data.world import World
from miles_core.errors import CheckpointError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.uint8]


@st.composite
def tensor(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(
        draw(st.sampled_from(DTYPES))
    )


@settings(max_examples=40)
@given(
    tensors=st.dictionaries(st.text("abc.é/ ", min_size=1, max_size=6), tensor(), max_size=3),
    data=JSON,
    name=st.from_regex(r"[a-z0-9_]{1,8}(/[a-z]{1,4})?", fullmatch=True),
)
def test_round_trip(tensors, data, name):
    with tempfile.TemporaryDirectory() as directory:
        Store(directory).put(name, tensors, data)
        store = Store(directory)
        assert name in store
        assert store.names() == [name]
        back, same = store.get(name)
    assert same == data
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        assert back[key].dtype == value.dtype
        assert torch.equal(back[key], value)


def test_views_and_shared_storage(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    Store(tmp_path).put("x", {"a": base, "row": base[1], "column": base[:, 2], "again": base})
    tensors, _ = Store(tmp_path).get("x")
    assert torch.equal(tensors["column"], base[:, 2])
    assert torch.equal(tensors["row"], base[1])
    assert torch.equal(tensors["again"], base)


@pytest.mark.parametrize("name", ["", "../up", "a/../b", "/abs", "a b", ".hidden", "x.0-of-2"])
def test_name_that_is_not_one(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name a checkpoint entry"):
        Store(tmp_path).put(name, data=1)


def test_entry_is_written_once_and_must_be_json(tmp_path):
    store = Store(tmp_path)
    store.put("mine", data=1)
    with pytest.raises(ValueError, match="already has an entry 'mine'"):
        store.put("mine", data=2)
    with pytest.raises(TypeError, match="'other': its data is not JSON"):
        store.put("other", data={1, 2})
    assert store.names() == ["mine"]


def test_missing_and_damaged_entries(tmp_path):
    store = Store(tmp_path)
    store.put("mine", {"t": torch.ones(3)}, {"a": 1})
    with pytest.raises(CheckpointError, match=r"no entry 'yours'.*entries: mine"):
        store.get("yours")
    file = tmp_path / "mine.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="mine is damaged"):
        store.get("mine")
    file.unlink()
    with pytest.raises(CheckpointError, match="mine"):
        store.get("mine")
    (tmp_path / "mine.json").write_text("{")
    with pytest.raises(CheckpointError, match="mine is damaged"):
        store.get("mine")


def test_ranks(tmp_path):
    for rank in range(2):
        store = Store(tmp_path, World(rank, 2))
        store.put("whole", {"t": torch.tensor(rank)}, rank)
        store.put("part", {"t": torch.tensor(rank)}, rank, sharded=True)
    assert Store(tmp_path, World(1, 2)).get("whole")[1] == 0
    assert Store(tmp_path, World(1, 2)).get("part")[1] == 1
    assert Store(tmp_path).names() == ["part", "whole"]
    assert "part" in Store(tmp_path)
    with pytest.raises(CheckpointError, match="saved by 2 ranks and this run has 1"):
        Store(tmp_path).get("part")
    assert [data for _, data in Store(tmp_path).shards("part")] == [0, 1]
    assert [data for _, data in Store(tmp_path).shards("whole")] == [0]
    assert json.loads((tmp_path / "part.1-of-2.json").read_text())["data"] == 1
