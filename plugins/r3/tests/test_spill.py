import gc
import json
import pickle

import numpy as np
import pytest

from miles_core.plugin import DataError
from miles_r3.spill import RouteBuffer, SpilledRoutes


def routes(seed=0):
    return np.random.default_rng(seed).integers(0, 8, (5, 2, 3)).astype(np.int32)


def test_records_beyond_the_size_go_to_files_and_come_back(tmp_path):
    buffer = RouteBuffer(tmp_path / "routes", 2)
    kept = [buffer.keep(routes(i), 8) for i in range(5)]
    assert [type(k) for k in kept] == [np.ndarray] * 2 + [SpilledRoutes] * 3
    assert len(list(tmp_path.glob("routes/*"))) == 3 and buffer.spilled == 3
    for i, record in enumerate(kept):
        assert len(record) == 5 and np.array_equal(np.asarray(record, np.int32), routes(i))
    del kept, record
    gc.collect()
    assert not list(tmp_path.glob("routes/*"))
    assert isinstance(buffer.keep(routes(), 8), np.ndarray)  # there is room in memory again


def test_without_a_size_everything_stays_in_memory(tmp_path):
    buffer = RouteBuffer(tmp_path / "routes", None)
    assert all(isinstance(buffer.keep(routes(i), 8), np.ndarray) for i in range(5))
    assert not (tmp_path / "routes").exists()


def test_a_pickled_record_depends_on_no_file(tmp_path):
    buffer = RouteBuffer(tmp_path / "routes", 0)
    record = buffer.keep(routes(), 8)
    data = pickle.dumps(record)
    assert np.array_equal(np.asarray(record), routes())
    del record
    gc.collect()
    assert not list(tmp_path.glob("routes/*"))
    back = pickle.loads(data)
    assert len(back) == 5 and np.array_equal(np.asarray(back), routes())
    assert np.array_equal(np.asarray(pickle.loads(pickle.dumps(back))), routes())


def test_leftovers_of_an_earlier_run_are_removed(tmp_path):
    (tmp_path / "1-0.routes").write_bytes(b"old")
    kept = RouteBuffer(tmp_path, 0).keep(routes(), 8)
    assert [p.read_bytes()[:3] for p in tmp_path.iterdir()] == [b"MR1"] and len(kept) == 5


def test_a_file_that_is_gone_is_named(tmp_path):
    record = RouteBuffer(tmp_path, 0).keep(routes(), 8)
    next(tmp_path.iterdir()).unlink()
    with pytest.raises(DataError, match="--r3-buffer-size"):
        np.asarray(record)


def training(run):
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    keep = ("train/", "mismatch/", "r3/tokens", "r3/routers", "reward/")
    return [{n: v for n, v in json.loads(line).items() if n.startswith(keep)} for line in lines]


def test_a_run_is_the_same_wherever_its_records_are(toy_run, tmp_path):
    memory = toy_run(["r3"], num_steps_per_rollout=2)
    spilled = toy_run(["r3"], directory=tmp_path / "run", num_steps_per_rollout=2, r3_buffer_size=3)
    assert training(memory) == training(spilled) and training(memory)[0]
    assert [m["r3/records_spilled"] for m in spilled.metrics] == [5, 5]
    gc.collect()
    assert not list((tmp_path / "run" / "routes").glob("*"))
