import errno
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import MilesError
from miles_core.observe.metrics import MetricLog, names, read, series


def test_records_come_back_in_order(tmp_path):
    with MetricLog(tmp_path / "run" / "metrics.jsonl") as log:
        log.append(0, {"eval/accuracy": 0.25})
        log.append(1, {"reward/mean": 0.5, "train/loss": torch.tensor(2.0)})
        assert len(read(log.path)) == 2  # flushed before close
    records = read(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1]
    assert records[1]["train/loss"] == 2.0
    assert names(records) == ["eval/accuracy", "reward/mean", "train/loss"]
    assert series(records, "reward/mean") == ([1], [0.5])


def test_what_is_not_finite_is_null_and_named(tmp_path, caplog):
    log = MetricLog(tmp_path / "m.jsonl")
    finite = log.append(3, {"train/loss": math.nan, "train/grad_norm": math.inf, "reward/mean": 1.0})
    assert finite == {"reward/mean": 1.0}
    assert "step 3: not a finite number: train/loss = nan, train/grad_norm = inf" in caplog.text
    record = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
    assert record["train/loss"] is None
    assert record["nonfinite"] == {"train/loss": "nan", "train/grad_norm": "inf"}
    steps, values = series([record], "train/loss")
    assert steps == [3]
    assert math.isnan(values[0])


def test_torn_last_line_is_skipped_then_removed(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a"')
    assert [r["step"] for r in read(path)] == [1]
    with MetricLog(path) as log:
        log.append(2, {"a": 2})
    assert [r["a"] for r in read(path)] == [1, 2]
    assert len(path.read_text().splitlines()) == 2


def test_torn_line_that_happens_to_be_valid_json_is_torn(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2}')
    with MetricLog(path) as log:
        log.append(2, {"a": 2})
    assert read(path)[1]["a"] == 2


def test_broken_line_inside_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nhello\n{"step": 3}\n')
    with pytest.raises(MilesError, match=r"line 2 of .*m.jsonl is not a metrics record \('hello'\)"):
        read(path)


@settings(max_examples=25)
@given(kept=st.integers(0, 12), torn=st.booleans())
def test_resume_drops_later_steps(tmp_path_factory, kept, torn):
    path = tmp_path_factory.mktemp("run") / "m.jsonl"
    with MetricLog(path) as log:
        for step in range(1, 11):
            log.append(step, {"a": step})
    if torn:
        with path.open("a") as file:
            file.write('{"step": 11')
    with MetricLog(path, resume_step=kept) as log:
        log.append(min(kept, 10) + 1, {"a": -1})
    assert [r["step"] for r in read(path)] == list(range(1, min(kept, 10) + 2))
    assert read(path)[-1]["a"] == -1


def test_no_file_is_no_records(tmp_path):
    assert read(tmp_path / "none.jsonl") == []


def test_full_disk_is_one_sentence(tmp_path, monkeypatch):
    log = MetricLog(tmp_path / "m.jsonl")

    class Full:
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log, "_file", Full())
    with pytest.raises(MilesError, match=r"cannot append step 4 to .*: No space left on device; free space"):
        log.append(4, {"a": 1})


def test_reserved_name(tmp_path):
    with pytest.raises(ValueError, match="'step'"):
        MetricLog(tmp_path / "m.jsonl").append(1, {"step": 1})


def test_sinks_get_finite_metrics(tmp_path):
    class Sink:
        def __init__(self):
            self.seen, self.closed = [], False

        def write(self, step, metrics):
            self.seen.append((step, dict(metrics)))

        def close(self):
            self.closed = True

    sink = Sink()
    with MetricLog(tmp_path / "m.jsonl", sinks=[sink]) as log:
        log.append(1, {"a": 1, "b": math.nan})
    assert sink.seen == [(1, {"a": 1.0})]
    assert sink.closed
