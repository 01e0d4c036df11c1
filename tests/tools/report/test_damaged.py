import gzip
import json
import re

import pytest

from miles_core.errors import MilesError
from miles_tools.report.report import report


def make_run(directory):
    directory.mkdir()
    (directory / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "reward/mean": 0.5}\n')
    return directory


@pytest.mark.parametrize(
    "change",
    [
        {"reward": {"part": 10**400}},
        {"reward": 10**400},
        {"rollout_log_probs": ["x"], "train_log_probs": [0.1]},
        {"advantages": 5},
        {"pieces": 7},
        {"loss_mask": 3},
    ],
)
def test_a_damaged_sample_leaves_the_report_complete(tmp_path, change):
    run = make_run(tmp_path / "run")
    file = run / "rollouts/train/00000001.jsonl.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(json.dumps({"step": 1, "pieces": ["a"], "reward": 1.0, **change}).encode()))
    assert "1 steps are complete" in report(run).read_text()


@pytest.mark.parametrize("whole", [0, 3])
def test_files_of_samples_that_are_damaged_are_counted(tmp_path, whole):
    run = make_run(tmp_path / "run")
    directory = run / "rollouts/train"
    directory.mkdir(parents=True)
    good = gzip.compress(json.dumps({"step": 1, "pieces": ["a"], "reward": 1.0}).encode())
    other = gzip.compress(b'{"step": 1, "pieces": 7}')
    for step, data in enumerate([good] * whole + [good[:-6], b"", other], 1):
        (directory / f"{step:08d}.jsonl.gz").write_bytes(data)
    page = report(run).read_text()
    data = json.loads(re.search('id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["overview"]["runs"][0]["problem"] == f"3 of {3 + whole} files with samples are damaged and left out."
    assert len(data["samples"]) == whole and data["overview"]["runs"][0]["steps"]["train"] == [1, 2, 3][:whole]


@pytest.mark.parametrize("text", ["rollout: 5", "defaults: [1]", "rollout: {num_rollout: many}"])
def test_an_edited_configuration_leaves_the_report_complete(tmp_path, text):
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text(text)
    assert "1 steps are complete" in report(run).read_text()


@pytest.mark.parametrize("value", ["[]", "{}", '""'])
def test_a_metric_that_is_no_number_is_one_sentence(tmp_path, value):
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(f'{{"step": 1, "reward/mean": {value}}}\n')
    with pytest.raises(MilesError, match=r"line 1 of .* is not a metrics record"):
        report(run)


def test_an_ending_with_a_text_as_time(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "ending.json").write_text('{"why": "stopped", "time": "now"}')
    assert "1 steps are complete" in report(run).read_text()


def test_a_report_is_not_written_through_links(tmp_path):
    run, victim = make_run(tmp_path / "run"), tmp_path / "victim"
    victim.write_text("mine")
    (run / "report.html").symlink_to(victim)
    report(run)
    assert victim.read_text() == "mine" and "<html" in (run / "report.html").read_text()
    for image in (run / "report").iterdir():
        image.unlink()
    (run / "report").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (run / "report").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MilesError, match="report is a link"):
        report(run)
    assert not list((tmp_path / "elsewhere").iterdir())
