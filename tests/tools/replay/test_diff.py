"""``miles diff`` names what was planted, and finds nothing in equal runs."""

import json

import pytest

from benchmarks.project.diff_runs import compare, is_named
from benchmarks.project.planted_differences import EQUAL, PLANTED, Side
from miles_core.errors import MilesError
from miles_tools.commands.diff import run as diff
from miles_tools.replay.compare import find_difference
from miles_tools.replay.stored_run import StoredRun


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named(name, tmp_path):
    planted = PLANTED[name]
    a, b = (side.run(tmp_path / label) for side, label in zip(planted.sides(tmp_path), "ab", strict=True))
    found, listed = compare(a, b)
    assert is_named(planted, found, listed), (found, listed)


@pytest.mark.parametrize("name", EQUAL)
def test_equal_runs_do_not_differ(name, tmp_path):
    a, b = (EQUAL[name].run(tmp_path / label) for label in "ab")
    assert compare(a, b) == (None, [])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs of one step without recorded steps, the second with another learning rate and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("pair")
    return [Side(options={"steps": 1, "record_steps": None, "lr": lr}).run(folder / f"{lr:g}") for lr in (1e-3, 2e-3)]


def test_without_recorded_steps_checkpoints_name_the_tensor(pair, capsys):
    assert diff([*map(str, pair)]) == 1
    text = capsys.readouterr().out
    assert "train.lr  0.001 | 0.002" in text and "recorded by both (--record-steps): none" in text
    found = find_difference(*map(StoredRun, pair))
    assert found is not None and (found.step, found.phase) == (1, "optimizer")
    assert found.what == "train/lr" and found.values == ("0.001", "0.002")
    assert diff([*map(str, pair), "--json", "--tolerance", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] is None


def test_runs_that_cannot_be_compared(pair, tmp_path):
    with pytest.raises(MilesError, match=r"^\S+: this run is given twice; give different runs"):
        diff([str(pair[0]), str(pair[0])])
    with pytest.raises(MilesError, match=r"^\S+/nothing: no such directory"):
        diff([str(pair[0]), str(tmp_path / "nothing")])
    with pytest.raises(MilesError, match=r"is not a run directory: it has no config\.yaml"):
        diff([str(pair[0]), str(tmp_path)])
    metrics = pair[1] / "metrics.jsonl"
    kept = metrics.read_text()
    metrics.write_text(kept.replace('"step": 1', '"step": 9'))
    with pytest.raises(MilesError, match=r"stored steps 1 to 1 and \S+ 9 to 9: no step is in both"):
        diff([*map(str, pair)])
    metrics.write_text("")
    with pytest.raises(MilesError, match=r"this run has completed no step$"):
        diff([*map(str, pair)])
    metrics.write_text(kept)
