import json
from pathlib import Path

import pytest

from miles_core.cli.main import main
from miles_tools.commands import demo

SHORT = [
    "--num-rollout",
    "2",
    "--sft-steps",
    "3",
    "--sft-batch-size",
    "8",
    "--rollout-batch-size",
    "4",
    "--plugins",
    "",
]


def test_demo_trains_and_ends_with_one_json_line(tmp_path, capsys):
    assert demo._parser().parse_args(["--save", "x"]).dir == "x"  # which it is called elsewhere
    assert main(["demo", "--dir", str(tmp_path / "run"), "--device", "cpu", "--json", *SHORT]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 <= line["accuracy_before"] <= 1
    assert 0 <= line["accuracy_after"] <= 1
    assert line["seconds_warm_start"] > 0
    assert line["seconds_rl"] > 0
    assert Path(line["report"]).read_text().startswith("<!")
    assert (Path(line["run_dir"]) / "checkpoints").is_dir()


def test_demo_refuses_a_directory_with_a_run(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["demo", "--dir", str(tmp_path)]) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed", "-1"], "train.seed cannot be -1"),
        (["--device", "cuda"], "needs a GPU"),
        (["--dir", ""], "--dir '': the path is empty"),
    ],
)
def test_what_is_wrong_with_the_arguments_is_said_before_anything_is_made(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
