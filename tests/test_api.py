"""What the Python API returns is readable in a notebook."""

from pathlib import Path

from miles_core.api import Result


def test_a_result_shows_how_the_run_ended_and_not_every_metric():
    result = Result(Path("runs/a"), [{"step": 1, "reward/mean": 0.5}], 1, 2, "finished", None, None)
    assert "runs/a" in repr(result) and "finished" in repr(result) and "reward/mean" not in repr(result)
