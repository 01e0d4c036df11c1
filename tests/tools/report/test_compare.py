"""``miles report A B`` shows what differs between runs."""

import json
import re

import pytest

from miles_core.errors import MilesError
from miles_tools.commands.report import run as command
from miles_tools.report.reading import shorten_paths
from miles_tools.report.report import compare


def make_run(directory, lr, rewards, **more):
    directory.mkdir(parents=True)
    records = [{"step": s, "time": float(s), "reward/mean": r, **more} for s, r in enumerate(rewards, 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (directory / "config.yaml").write_text(
        f"train: {{lr: {lr}}}\nrun: {{save: {directory}}}\ndefaults:\n  rollout: {{temperature: 1.0}}\n"
    )
    (directory / "plan.json").write_text(json.dumps({"plugins": [{"name": "tis", "version": f"0.{len(rewards)}"}]}))
    return directory


def overview_of(page):
    return json.loads(re.search('id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])["overview"]


def test_options_versions_and_last_values_are_compared(tmp_path, monkeypatch, capsys):
    one, two = (
        make_run(tmp_path / "one", 1e-3, [0.1, 0.25]),
        make_run(tmp_path / "two", 1e-4, [0.1, 0.2, 0.5], **{"mine/x": 3.0}),
    )
    monkeypatch.chdir(tmp_path)
    assert command([str(one), str(two)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "compare.html")
    found = overview_of(tmp_path / "compare.html")
    assert found["differences"] == [["train.lr", ["0.001", "0.0001"]], ["version of tis", ["0.2", "0.3"]]]
    last = [{row[0]: row[2] for row in run["rows"]} for run in found["runs"]]
    assert last == [{"reward/mean": "0.25"}, {"reward/mean": "0.5", "mine/x": "3"}]
    plots = {plot["title"]: plot for section in found["sections"] for plot in section["plots"]}
    assert [line["label"] for line in plots["Reward"]["lines"]] == ["one", "two"]


def test_equal_runs_say_so_and_paths_are_shortened(tmp_path):
    one, two = (make_run(tmp_path / name / "run", 1e-3, [0.1]) for name in "ab")
    target = compare([one, two], tmp_path / "both.html")
    assert overview_of(target)["differences"] == []
    assert shorten_paths([one, two]) == ["a/run", "b/run"]


def test_seeds_are_a_group_however_they_are_stored(tmp_path):
    one, two, three = (make_run(tmp_path / name, lr, [0.1]) for name, lr in (("a", 1e-3), ("b", 1e-3), ("c", 1e-2)))
    config = two / "config.yaml"
    config.write_text(config.read_text().replace("run: {", "replay: {record_steps: true}\nrun: {keep: 3, "))
    found = overview_of(compare([one, two, three], tmp_path / "all.html"))
    assert [group["runs"] for group in found["groups"]] == [["a", "b"], ["c"]]
    assert ["run.keep", ["-", "3", "-"]] in found["differences"]


def test_runs_that_cannot_be_compared_are_refused_by_name(tmp_path):
    one = make_run(tmp_path / "one", 1e-3, [0.1])
    (tmp_path / "none").mkdir()
    with pytest.raises(MilesError, match="one: this run is given twice"):
        compare([one, one])
    with pytest.raises(MilesError, match=r"none is not a run directory"):
        compare([one, tmp_path / "none"])
    with pytest.raises(MilesError, match="9 runs: at most 8 fit on one page"):
        compare([tmp_path / str(i) for i in range(9)])
