"""The experiment on training curves: flags of its runs, and comparison over equal steps."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.mismatch import collapse

WARM_START = {
    "--sft-batch 32": "--sft-batch-size 32",
    "--adam-beta2 0.8": "--adam-beta2 0.8",
    "--dtype float32": "--dtype float32",
}
ALGORITHM = {
    "--reward exact": "/task/exact.py:reward",
    "--estimator rloo": "--advantage-estimator rloo",
    "--adam-eps 0.001": "--adam-eps 0.001",
    "--entropy 0.02": "--entropy-coef 0.02",
    "--updates 4": "--num-steps-per-rollout 4",
    "--prompts 64": "--rollout-batch-size 64",
}


@pytest.mark.parametrize("flag", ALGORITHM)
def test_a_flag_of_the_algorithm_changes_runs_and_no_warm_start(tmp_path, monkeypatch, flag):
    monkeypatch.setattr("miles_tools.demo.model.make_checkpoint", lambda *args: None)
    plain = collapse.parse(["--out", str(tmp_path)])
    given = collapse.parse(["--out", str(tmp_path), *flag.split()])
    assert ALGORITHM[flag] in collapse.run_of(given, 1e-3, "plain", 0).words
    assert ALGORITHM[flag] not in collapse.run_of(plain, 1e-3, "plain", 0).words
    assert collapse.warm_start(given, 0).words == collapse.warm_start(plain, 0).words


@pytest.mark.parametrize("flag", WARM_START)
def test_a_flag_of_the_warm_start_reaches_it(tmp_path, monkeypatch, flag):
    monkeypatch.setattr("miles_tools.demo.model.make_checkpoint", lambda *args: None)
    given = collapse.parse(["--out", str(tmp_path), *flag.split()])
    assert WARM_START[flag] in collapse.warm_start(given, 0).words
    assert WARM_START[flag] not in collapse.warm_start(collapse.parse(["--out", str(tmp_path)]), 0).words


def test_the_model_has_the_given_number_of_experts_per_token(tmp_path, monkeypatch):
    shapes = []
    monkeypatch.setattr("miles_tools.demo.model.make_checkpoint", lambda place, seed, shape: shapes.append(shape))
    collapse.warm_start(collapse.parse(["--out", str(tmp_path), "--experts-per-token", "4"]), 0)
    assert shapes[0].experts_per_token == 4 and shapes[0].expert_hidden == 128


def test_a_prefix_separates_runs_that_share_a_directory(tmp_path):
    given = collapse.parse(["--out", str(tmp_path), "--prefix", "eight-"])
    assert collapse.run_of(given, 1e-3, "plain", 2).place.name == "eight-0.001-plain-2"


def test_rewards_count_the_share_before_the_first_wrong_digit_or_the_whole_answer():
    rewards = {}
    for name, source in collapse.REWARDS.items():
        space: dict[str, object] = {}
        exec(source, space)
        rewards[name] = space["reward"]
    near, right = SimpleNamespace(response="1235", label="1234"), SimpleNamespace(response="1234", label="1234")
    assert [rewards["share"](None, s)["score"] for s in (near, right)] == [0.75, 1.0]
    assert [rewards["exact"](None, s)["score"] for s in (near, right)] == [0.0, 1.0]


def test_a_run_that_failed_does_not_shorten_the_others():
    assert [collapse.equal_steps(made) for made in ([90, 12, 84], [90, 45], [0, 0])] == [84, 45, 0]


def test_equal_steps_compares_what_all_runs_have_made(tmp_path, capsys):
    words = ["--out", str(tmp_path), "--arms", "bf16", "plain", "--seeds", "1", "2", "--lr", "1e-3", "--steps", "100"]
    given = collapse.parse([*words, "--equal-steps"])
    for number, run in enumerate(collapse.arm_runs(given)):
        run.place.mkdir()
        (run.place / "flags.txt").write_text(run.words)
        row = {"reward/mean": 0.5, "mismatch/kl_k3": 0.0, "mismatch/abs_log_prob": 0.0, "train/grad_norm": 1.0}
        lines = [json.dumps(row | {"step": step}) + "\n" for step in range(1, 21 + number)]
        (run.place / "metrics.jsonl").write_text("".join(lines))
    collapse.report(given, True)
    found = json.loads(capsys.readouterr().out)
    assert found["complete"] and found["settings"]["steps"] == 20
    assert [row["steps"] for row in found["learning_rates"]["0.001"].values()] == [[20, 20], [20, 20]]
    collapse.report(collapse.parse(words), True)
    assert json.loads(capsys.readouterr().out)["learning_rates"]["0.001"]["plain"]["steps"] == [22, 23]
