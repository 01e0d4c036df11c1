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
        (["x"], "unexpected argument 'x'"),
        (["--device", "cuda"], "needs a GPU"),
        (["--dir", ""], "--dir '': the path is empty"),
    ],
)
def test_what_is_wrong_with_the_arguments_is_said_before_anything_is_made(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("processors", "load", "free"), [(8, 0.2, 8), (8, 3.4, 5), (8, 30.0, 1), (2, 1.6, 1), (1, 0.0, 1)]
)
def test_threads_leave_room_for_other_processes(processors, load, free):
    assert demo.free_processors(processors, load) == free


@pytest.mark.parametrize("chosen", ["", "3"])
def test_a_busy_machine_gets_fewer_threads(monkeypatch, capsys, chosen):
    used = []
    monkeypatch.setattr("torch.set_num_threads", used.append)
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(demo.os, "getloadavg", lambda: (5.7, 1.0, 1.0))
    monkeypatch.setattr(demo.os, "environ", {"OMP_NUM_THREADS": chosen} if chosen else {})
    demo._leave_processors_to_others()
    assert used == ([] if chosen else [2])
    said = capsys.readouterr().err
    assert ("other processes use about 6 of 8 processors: running with 2 threads" in said) is not chosen.isdigit()
