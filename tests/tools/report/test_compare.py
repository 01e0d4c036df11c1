"""``miles report A B`` shows what differs between runs."""

import json

import pytest

from miles_core.errors import MilesError
from miles_tools.commands.report import run as command
from miles_tools.report.compare import compare, shorten_paths


def make_run(directory, lr, rewards, **more):
    directory.mkdir(parents=True)
    records = [{"step": s, "time": float(s), "reward/mean": r, **more} for s, r in enumerate(rewards, 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (directory / "config.yaml").write_text(
        f"train: {{lr: {lr}}}\nrun: {{save: {directory}}}\ndefaults:\n  rollout: {{temperature: 1.0}}\n"
    )
    (directory / "plan.json").write_text(json.dumps({"plugins": [{"name": "tis", "version": f"0.{len(rewards)}"}]}))
    return directory


def rows(page):
    """First cell -> the other cells, of every row."""
    found = [row.split("<td") for row in page.split("<tr>") if "<td" in row]
    cells = [[cell.split(">", 1)[1].split("<")[0] for cell in row[1:]] for row in found]
    return {first: rest for first, *rest in cells}


def test_options_versions_and_last_values_are_compared(tmp_path, monkeypatch, capsys):
    one, two = (
        make_run(tmp_path / "one", 1e-3, [0.1, 0.25]),
        make_run(tmp_path / "two", 1e-4, [0.1, 0.2, 0.5], **{"mine/x": 3.0}),
    )
    monkeypatch.chdir(tmp_path)
    assert command([str(one), str(two)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "compare.html")
    page = (tmp_path / "compare.html").read_text()
    assert rows(page) == {
        "train.lr": ["0.001", "0.0001"],
        "version of tis": ["0.2", "0.3"],
        "reward/mean": ["0.25", "0.5"],
        "mine/x": ["-", "3"],
    }
    assert page.count("data:image/png") == 1 and "<style>" in page


def test_equal_runs_say_so_and_paths_are_shortened(tmp_path):
    one, two = (make_run(tmp_path / name / "run", 1e-3, [0.1]) for name in "ab")
    target = compare([one, two], tmp_path / "both.html")
    assert "All options and versions of plugins are equal." in target.read_text()
    assert shorten_paths([one, two]) == ["a/run", "b/run"]


def test_runs_that_cannot_be_compared_are_refused_by_name(tmp_path):
    one = make_run(tmp_path / "one", 1e-3, [0.1])
    (tmp_path / "none").mkdir()
    with pytest.raises(MilesError, match="one: this run is given twice"):
        compare([one, one])
    with pytest.raises(MilesError, match=r"none: no metrics.jsonl; give run directories"):
        compare([one, tmp_path / "none"])
    with pytest.raises(MilesError, match="9 runs: at most 8 fit into one comparison"):
        compare([tmp_path / str(i) for i in range(9)])
