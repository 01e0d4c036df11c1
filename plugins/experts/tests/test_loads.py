"""Statistics of expert loads, their file, and the plot in the report."""

import json
import math

import pytest
import torch

from miles_core import api
from miles_core.plugin import MilesError
from miles_experts.loads import summarise, write_loads


def test_the_statistics_are_those_of_the_counts():
    loads = [torch.tensor([4.0, 4.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])]
    found = summarise(loads)
    assert found["expert_entropy"] == pytest.approx((math.log(2) / math.log(4) + 1) / 2)
    assert found["experts_unused"] == 2
    assert summarise([torch.zeros(4)]) == summarise([]) == {}


def test_the_file_holds_loads_relative_to_the_mean(tmp_path):
    write_loads(tmp_path / "expert_loads.json", [torch.tensor([6.0, 2.0]), torch.zeros(2), torch.tensor([1.0, 1.0])])
    grid = json.loads((tmp_path / "expert_loads.json").read_text())
    assert grid["values"] == [[1.5, 0.5], [1.0, 1.0]] and grid["names"] == [0, 2]


def test_a_run_writes_loads_and_the_report_draws_them(toy_run):
    done = toy_run(["experts"], steps=2, family="deepseek_v3")
    step = next(m for m in done.metrics if "train/loss" in m)
    assert 0 < step["train/expert_entropy"] <= 1 and step["train/experts_unused"] >= 0
    grid = json.loads((done.run.directory / "expert_loads.json").read_text())
    (layer,) = grid["values"]
    assert len(layer) == 4 and sum(layer) == pytest.approx(4, abs=1e-3)
    # the busiest expert of the only step is core's metric
    first = toy_run(["experts"], steps=1, family="deepseek_v3")
    (layer,) = json.loads((first.run.directory / "expert_loads.json").read_text())["values"]
    assert max(layer) == pytest.approx(
        next(m for m in first.metrics if "train/loss" in m)["train/expert_imbalance"], abs=1e-3
    )
    page = api.report(done.run.directory).read_text()
    assert "Load of experts relative to the mean of their layer" in page
    assert (done.run.directory / "report" / "expert_loads.png").stat().st_size > 2000
    assert (done.run.directory / "report" / "expert_entropy.png").is_file()
    for damaged in ("{", '{"values": [[1], [2, 3]], "names": [0, 1], "rows": "", "columns": ""}', "[]"):
        (done.run.directory / "expert_loads.json").write_text(damaged)
        with pytest.raises(MilesError, match=r"expert_loads.json is not a grid of a report"):
            api.report(done.run.directory)


def test_totals_survive_a_resume(toy_run):
    half = toy_run(["experts"], steps=1)
    whole = toy_run(["experts"], steps=2, load=half.directory, save=None, directory=None)
    straight = toy_run(["experts"], steps=2)
    ours, theirs = (json.loads((r.run.directory / "expert_loads.json").read_text()) for r in (whole, straight))
    assert ours == theirs
