import json
from pathlib import Path

import pytest

from miles_core.errors import MilesError
from miles_tools.demo.outcome import outcome


def write(directory: Path, records):
    (directory / "metrics.jsonl").write_text("".join(json.dumps({"time": 0.0, **r}) + "\n" for r in records))


def test_outcome_reads_first_and_last_evaluation_and_adds_up_time(tmp_path):
    write(
        tmp_path,
        [
            {"step": 0, "time/warm_start": 12.5, "time/step": 13.0},
            {"step": 0, "eval/accuracy": 0.4},
            {"step": 1, "time/step": 2.0},
            {"step": 2, "time/step": 3.0, "eval/accuracy": 0.97},
        ],
    )
    found = outcome(tmp_path, tmp_path / "report.html")
    assert (found.accuracy_before, found.accuracy_after) == (0.4, 0.97)
    assert (found.seconds_warm_start, found.seconds_rl) == (12.5, 5.0)
    assert set(json.loads(found.json())) == {
        "accuracy_before",
        "accuracy_after",
        "seconds_warm_start",
        "seconds_rl",
        "run_dir",
        "report",
    }
    assert "40.0%" in found.text()
    assert str(tmp_path / "report.html") in found.text()


def test_a_run_without_evaluations_is_refused(tmp_path):
    write(tmp_path, [{"step": 1, "time/step": 2.0}])
    with pytest.raises(MilesError, match="0 evaluations"):
        outcome(tmp_path, tmp_path / "report.html")
