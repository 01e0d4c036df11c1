"""``miles diff`` names what was planted, and finds nothing in equal runs. ``make test-thorough`` compares all thirty pairs."""

import json
import shutil

import pytest

from miles_core.errors import MilesError
from miles_tools.commands.diff import run as diff
from miles_tools.replay.compare import find_difference, list_differences
from miles_tools.replay.steps import step_directory
from miles_tools.replay.stored_run import StoredRun
from tests.tools.replay.planted_differences import EQUAL, PLANTED, Side

#: At least one planted difference of each phase, and equal pairs, for ``make test``.
QUICK = {
    *(
        "one flipped weight",
        "prompt order",
        "a dropped sample",
        "reward",
        "advantage estimator",
        "a plugin's rounding",
        "learning rate",
    ),
    *("a missing sync", "another library version", "defaults", "routing replay and importance sampling"),
}


def compare(a, b):
    """Return what ``miles diff`` finds, and the options and versions that differ."""
    one, other = StoredRun(a), StoredRun(b)
    return find_difference(one, other), list_differences(one, other)


def pairs(named):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in named]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without options, which is one side of most pairs."""
    return Side().run(tmp_path_factory.mktemp("plain") / "a")


@pytest.mark.parametrize("name", pairs(PLANTED))
def test_what_was_planted_is_named(name, plain, tmp_path):
    planted = PLANTED[name]
    sides = zip(planted.sides(tmp_path), "ab", strict=True)
    a, b = (plain if side == Side() else side.run(tmp_path / label) for side, label in sides)
    found, listed = compare(a, b)
    assert planted.is_named(found, listed), (found, listed)


@pytest.mark.parametrize("name", pairs(EQUAL))
def test_equal_runs_do_not_differ(name, tmp_path):
    a, b = (EQUAL[name].run(tmp_path / label) for label in "ab")
    assert compare(a, b) == (None, [])


def test_a_later_step_and_the_first_engine_name_the_place(plain, tmp_path):
    changed = tmp_path / "b"
    shutil.copytree(plain, changed)
    assert find_difference(StoredRun(plain), StoredRun(changed)) is None
    for step, kind, phase in ((3, "after", "optimizer"), (2, "gradients", "gradient"), (1, "before", "weights")):
        file = step_directory(changed, step) / "sums.policy.0.json"
        sums = json.loads(file.read_text())
        name = [*sums["steps"][0][kind]][1]
        sums["steps"][0][kind][name] ^= 1
        file.write_text(json.dumps(sums))
        found = find_difference(StoredRun(plain), StoredRun(changed))
        assert (found.step, found.phase, found.tensor, found.tensors[0]) == (step, phase, name, 1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs of one step without recorded steps, with a checkpoint of it; the second decays weights more."""
    folder = tmp_path_factory.mktemp("pair")
    return [
        Side(options={"steps": 1, "record_steps": None, "weight_decay": decay}).run(folder / f"{decay:g}")
        for decay in (0.1, 0.5)
    ]


def test_without_recorded_steps_checkpoints_name_the_tensor(pair, capsys):
    assert diff([*map(str, pair)]) == 1
    text = capsys.readouterr().out
    assert "train.weight_decay  0.1 | 0.5" in text and "recorded by both (--record-steps): none" in text
    assert "step 1, optimizer, tensor " in text and "checkpoint" in text
    assert diff([*map(str, pair), "--json", "--tolerance", "1e-6"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] is None


def test_recording_is_no_difference_of_options(pair, plain):
    _, listed = compare(pair[0], plain)
    assert [name for name, *_ in listed] == ["rollout.num_rollout"]


def test_runs_that_cannot_be_compared(pair, plain, tmp_path):
    a, b = (tmp_path / name for name in "ab")
    shutil.copytree(plain, a)
    shutil.copytree(pair[1], b)

    def refused(match, one, other):
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        with pytest.raises(MilesError, match=match) as caught:
            diff([str(one), str(other)])
        assert "\n" not in str(caught.value)
        assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    refused(r"^\S+: this run is given twice; give different runs", a, a)
    refused(r"^\S+/nothing: no such directory", a, tmp_path / "nothing")
    refused(r"is not a run directory: it has neither metrics\.jsonl", a, tmp_path)
    refused(r"is not a run directory: it has neither", a / "steps", b)
    for name, match in (
        ("sums.policy.0.json", r"sums\.policy\.0\.json is not what a run wrote"),
        ("samples.json", r"the files of this step are damaged or incomplete"),
    ):
        broken = tmp_path / f"broken {name}"
        shutil.copytree(plain, broken)
        file = step_directory(broken, 2) / name
        file.write_text(file.read_text()[:20])
        refused(match, a, broken)
    metrics = b / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 1', '"step": 9'))
    refused(r"completed steps 1 to 3 and \S+ step 9: no step is in both", a, b)
    metrics.write_text("")
    refused(r"this run has completed no step$", a, b)
