"""``miles plan --search``."""

import json
import shlex

import pytest

from miles_core.config.load import load
from miles_core.plugin import ConfigError
from miles_core.run.prepare import prepare
from miles_planning.commands import plan

BATCH = ["--rollout-batch-size", "64", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "8192"]


def run_search(capsys, *argv):
    code = plan(["--search", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_every_proposed_command_is_a_run_that_the_plan_accepts(checkpoint, capsys):
    code, result = run_search(capsys, "--hf-checkpoint", checkpoint("qwen3-235b-a22b"), "--hardware", "64xH200", *BATCH)
    assert code == 0 and len(result["best"]) >= 3
    assert result["trainer_layouts"] > 100 and result["engine_layouts"] >= 4
    for row in result["best"]:
        words = shlex.split(row["command"])
        assert words[:2] == ["miles", "train"]
        resolved, _ = prepare(load(words[2:]), ["hardware=64xH200"])
        table = next(text for text in resolved.reviews if text.startswith("memory of a GPU"))
        assert f"{row['trainer']['peak_gb']:.1f}" in table, "the search and the plan count the same memory"
    seconds = [row["seconds"] for row in result["best"]]
    assert seconds == sorted(seconds)
    assert {row["colocated"] for row in result["best"]} == {True, False}


def test_a_schedule_that_the_user_sets_is_possible_with_every_proposal(checkpoint, capsys):
    given = ["--hf-checkpoint", checkpoint("qwen3-30b-a3b"), *BATCH]
    argv = [*given, "--schedule", "async", "--max-weight-staleness", "2", "--plugins", "tis", "--hardware", "24xH100"]
    _, result = run_search(capsys, *argv)
    assert result["best"] and not any(row["colocated"] for row in result["best"])
    for row in result["best"]:
        prepare(load(shlex.split(row["command"])[2:]), ["hardware=24xH100"])
    assert plan(["--search", *argv, "--top", "1"]) == 0
    assert "at the same time, samples at most 2 steps old" in capsys.readouterr().out


def test_what_the_user_sets_is_kept(checkpoint, capsys):
    fixed = [
        "--tensor-model-parallel-size",
        "4",
        "--rollout-precision",
        "bf16",
        "--train-precision",
        "bf16",
        "--colocate",
    ]
    _, result = run_search(
        capsys, "--hf-checkpoint", checkpoint("qwen3-30b-a3b"), "--hardware", "16xH100", *BATCH, *fixed
    )
    assert len(result["best"]) == 1
    best = result["best"][0]
    assert best["colocated"] and best["trainer"]["tp"] == 4
    assert best["engine"]["precision"] == best["trainer"]["precision"] == "bf16"


def test_what_cannot_fit_is_explained_with_numbers(checkpoint, capsys):
    argv = ["--hf-checkpoint", checkpoint("kimi-k2"), "--hardware", "8xH100", *BATCH]
    assert plan(["--search", *argv]) == 2
    text = capsys.readouterr().out
    assert "trainer: the smallest of" in text and "GB on a GPU of 86 GB" in text
    assert "engines in fp8: on 8 GPUs" in text and "take 129 GB on each" in text


def test_longer_responses_and_fewer_gpus_take_longer(checkpoint, capsys):
    model = checkpoint("qwen3-30b-a3b")
    fixed = ["--hf-checkpoint", model, *BATCH, "--colocate", "--rollout-precision", "bf16", "--train-precision", "bf16"]

    def seconds(*argv):
        return run_search(capsys, *fixed, *argv)[1]["best"][0]["seconds"]

    short = seconds("--hardware", "32xH100", "--mean-response-len", "1000")
    assert seconds("--hardware", "32xH100", "--mean-response-len", "6000") > 1.5 * short
    assert seconds("--hardware", "8xH100", "--mean-response-len", "1000") > short


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give the model with --hf-checkpoint"),
        (["--hf-checkpoint", "MODEL"], "there is no GPU here; give the hardware"),
        (["--hf-checkpoint", "MODEL", "--hardware", "8xMI300X"], "no rates for the GPU MI300X"),
        (
            ["--hf-checkpoint", "MODEL", "--hardware", "8xH200", "--mean-response-len", "9000"],
            "--mean-response-len 9000 must be",
        ),
        (
            ["--hf-checkpoint", "MODEL", "--hardware", "8xH200", "--engine", "embedded"],
            "--engine embedded: no layouts of this engine",
        ),
        (["--hf-checkpoint", "MODEL", "--hardware", "8xH100,8xH200"], "a run needs GPUs of one kind"),
        (
            ["--hf-checkpoint", "MODEL", "--hardware", "8xH100", "--hardware=8xH200"],
            "8xH100 and 8xH200: a run needs GPUs of one kind",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(argv, message, checkpoint):
    words = [checkpoint("qwen3-4b") if word == "MODEL" else word for word in argv]
    with pytest.raises(ConfigError, match=message):
        plan(["--search", *words])


def test_the_embedded_trainer_is_searched_too(checkpoint, capsys):
    argv = ["--hf-checkpoint", checkpoint("qwen3-4b"), "--hardware", "8xH100", "--trainer", "embedded", *BATCH]
    code, result = run_search(capsys, *argv)
    assert code == 0 and all("--trainer embedded" in row["command"] for row in result["best"])
