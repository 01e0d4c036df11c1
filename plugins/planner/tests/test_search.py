"""``miles plan --search``."""

import json
import shlex
from pathlib import Path

import pytest

from miles_core.cli.plan import run as plan
from miles_core.config.load import load
from miles_core.plugin import ConfigError
from miles_core.run.prepare import prepare
from miles_planner.one_process import find_in_one_process

ROOT = Path(__file__).parents[3]
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


def test_a_hub_name_that_is_not_here_is_named_with_the_file_to_fetch(capsys):
    argv = ["--hf-checkpoint", "no-such-org/no-such-model", "--hardware", "8xH200"]
    with pytest.raises(
        ConfigError, match=r"a search needs its config\.json: hf download no-such-org/no-such-model config.json"
    ):
        plan(["--search", *argv])
    assert plan([*argv, "--prompt-data", "a.jsonl"]) == 0
    assert (
        "warning: sizes and memory are not checked, because no-such-org/no-such-model is neither"
        in capsys.readouterr().out
    )


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
    assert result["best"] and not result["relaxed"]
    for row in result["best"]:
        assert row["colocated"] and row["trainer"]["tp"] == 4
        assert row["engine"]["precision"] == row["trainer"]["precision"] == "bf16"


def test_number_formats_change_only_if_allowed(checkpoint, capsys):
    argv = ["--hf-checkpoint", checkpoint("qwen3-30b-a3b"), "--hardware", "16xH100", *BATCH]
    _, kept = run_search(capsys, *argv)
    assert {(row["engine"]["precision"], row["trainer"]["precision"]) for row in kept["best"]} == {("bf16", "bf16")}
    _, free = run_search(capsys, *argv, "--allow-precision")
    assert free["best"][0]["engine"]["precision"] == "fp8"
    _, half = run_search(capsys, *argv, "--allow-precision", "--rollout-precision", "bf16")
    assert {row["engine"]["precision"] for row in half["best"]} == {"bf16"}


def test_a_faster_weight_sync_is_proposed_and_named(checkpoint, capsys):
    argv = ["--hf-checkpoint", checkpoint("qwen3-235b-a22b"), "--hardware", "64xH200", *BATCH]
    _, result = run_search(capsys, *argv)
    for row in result["best"]:
        assert row["plugins"] == ["zero_copy"] and "--plugins zero_copy is added" in row["changed"]
        assert row["command"].endswith("--plugins zero_copy") and row["time"]["sync"] < 60
    _, with_tis = run_search(capsys, *argv, "--plugins", "tis")
    assert with_tis["best"][0]["command"].endswith("--plugins tis,zero_copy")
    _, given = run_search(capsys, *argv, "--transport", "copy")
    assert all(not row["plugins"] and row["time"]["sync"] > 60 for row in given["best"])


def read_recipes():
    """Returns the command lines of ``recipes/`` for this program, without ``miles train``."""
    text = (ROOT / "recipes" / "qwen3-30b-a3b-one-node.md").read_text(encoding="utf-8")
    blocks = [block.partition("```")[0] for block in text.split("```text\n")[1:]]
    return [shlex.split(block.replace("\\\n", " "))[2:] for block in blocks if block.startswith("miles train")]


def replace_model(words, directory):
    words = list(words)
    words[words.index("--hf-checkpoint") + 1] = directory
    return words


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("hardware", ["8xH100", "8xH200"])
def test_a_published_command_line_is_searched_as_it_is(checkpoint, capsys, number, hardware):
    words = replace_model(read_recipes()[number], checkpoint("qwen3-30b-a3b"))
    code, result = run_search(capsys, "--hardware", hardware, *words)
    assert code == 0 and result["typed"] == {"seconds": result["typed"]["seconds"], "refused": ""}
    best = result["best"]
    assert [row["seconds"] for row in best] == sorted(row["seconds"] for row in best)
    assert best[0]["seconds"] < result["typed"]["seconds"]
    for row in best:
        assert row["colocated"] and row["engine"]["precision"] == row["trainer"]["precision"] == "bf16"
        assert row["changed"] and "--sglang-mem-fraction-static 0.7" in row["command"]
        line = shlex.split(row["command"])[2:]
        assert all(line.count(flag) == 1 for flag in line if flag.startswith("--"))
        prepare(load(line), [f"hardware={hardware}"])


def test_each_layout_says_what_it_changes_in_a_complete_command_line(checkpoint, capsys):
    sizes = {"tensor": 4, "pipeline": 2, "context": 1, "expert": 4}
    typed = [
        word
        for name, n in sizes.items()
        for word in (f"--{name}{'-model' * (name != 'context')}-parallel-size", str(n))
    ]
    typed += [
        "--expert-tensor-parallel-size",
        "2",
        "--sequence-parallel",
        "--recompute-granularity",
        "full",
        "--colocate",
    ]
    typed += ["--actor-num-nodes", "8", "--actor-num-gpus-per-node", "8", "--rollout-num-gpus-per-engine", "16"]
    argv = ["--hf-checkpoint", checkpoint("qwen3-235b-a22b"), "--hardware", "8x8xH200", *BATCH, *typed]
    assert plan(["--search", *argv, "--sglang-mem-fraction-static", "0.7"]) == 0
    text = capsys.readouterr().out
    assert "as typed: " in text and "times as fast as typed" in text and "changes: --plugins zero_copy is added" in text
    assert "these may change below: " in text and "--tensor-model-parallel-size 4 -> " in text
    assert "--sglang-mem-fraction-static 0.7 ->" not in text


@pytest.mark.parametrize("model", ["qwen3-235b-a22b", "deepseek-v3"])
def test_no_absurd_pipeline_is_proposed(checkpoint, capsys, model):
    argv = ["--hf-checkpoint", checkpoint(model), "--hardware", "256xH200", *BATCH]
    _, result = run_search(capsys, *argv)
    assert result["best"]
    for t in (row["trainer"] for row in result["best"]):
        assert t["pp"] <= 4 * t["ep"] and t["ep"] <= 64, t
        assert all(row["time"]["training"]["bubble"] <= 0.25 for row in result["best"])


def test_what_cannot_fit_is_explained_with_numbers(checkpoint, capsys):
    argv = ["--hf-checkpoint", checkpoint("kimi-k2"), "--hardware", "8xH100", *BATCH]
    assert plan(["--search", *argv]) == 2
    text = capsys.readouterr().out
    assert "trainer: the smallest of" in text and "GB on a GPU of 86 GB" in text
    assert (
        "engines in bf16: on 8 GPUs" in text and "--allow-precision also tries" in text and "engines in fp8" not in text
    )
    assert plan(["--search", *argv, "--allow-precision"]) == 2
    text = capsys.readouterr().out
    assert "engines in fp8: on 8 GPUs" in text and "take 129 GB on each" in text
    assert plan(["--search", *argv, "--sglang-mem-fraction-static", "0.5"]) == 2
    assert "--sglang-mem-fraction-static 0.5 gives them 43 of 86 GB" in capsys.readouterr().out


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
        (["--hf-checkpoint", "MODEL", "--hardware", ""], "--hardware is empty: give machines, GPUs and their type"),
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


def test_a_layout_that_the_user_sets_is_estimated_even_if_no_search_would_propose_it(checkpoint, capsys):
    """46 layers in stages of 12, 12, 12 and 10, as a recipe of miles has them."""
    typed = ["--pipeline-model-parallel-size", "4", "--num-layers-in-last-pipeline-stage", "10"]
    typed += ["--tensor-model-parallel-size", "1", "--expert-model-parallel-size", "8", "--actor-num-nodes", "4"]
    typed += ["--rollout-num-gpus", "48", "--recompute-granularity", "full"]
    argv = ["--hf-checkpoint", checkpoint("glm-4.5-air"), "--hardware", "80xH100", *BATCH, *typed]
    code, result = run_search(capsys, *argv)
    assert code == 0, result["misfits"]
    for row in result["best"]:
        assert (row["trainer"]["ranks"], row["trainer"]["pp"], row["trainer"]["recompute"]) == (32, 4, 1.0)
        words = shlex.split(row["command"])
        assert words.count("--num-layers-in-last-pipeline-stage") == 1
        prepare(load(words[2:]), ["hardware=80xH100"])


def test_an_engine_that_is_full_of_weights_is_tried_on_twice_the_gpus(checkpoint, capsys):
    large = ["--rollout-batch-size", "256", "--n-samples-per-prompt", "16", "--rollout-max-response-len", "16384"]
    argv = ["--hf-checkpoint", checkpoint("kimi-k2"), "--hardware", "256xH200", *large, "--rollout-precision", "fp8"]
    _, result = run_search(capsys, *argv)
    for colocated in (True, False):
        first = next(row for row in result["best"] if row["colocated"] is colocated)
        assert first["engine"]["tp"] == 16, "on 8 GPUs the cache holds a few sequences"
    assert {row["colocated"] for row in result["best"]} == {True, False}, "and the trainer's weights fit next to it"


def test_a_short_sample_is_not_split_over_gpus(checkpoint, capsys):
    short = ["--rollout-max-context-len", "4096", "--rollout-max-response-len", "4096", "--max-tokens-per-gpu", "4096"]
    argv = ["--hf-checkpoint", checkpoint("llama3.1-8b"), "--hardware", "16xH100", "--rollout-batch-size", "64", *short]
    _, result = run_search(capsys, *argv)
    assert {row["trainer"]["cp"] for row in result["best"]} == {1}
    _, result = run_search(capsys, *argv, "--context-parallel-size", "4")
    assert {row["trainer"]["cp"] for row in result["best"]} == {4}, "unless the user wants it"


@pytest.mark.parametrize(
    ("hardware", "options", "messages", "absent"),
    [
        ("8xH200", [], ["trainer: the smallest of"], "engines in"),  # engines fit
        ("64xH200", ["--train-precision", "nvfp4"], ["train.precision nvfp4 needs the trainer capability format:nvfp4"], "placement:"),
    ],
    ids=["the trainer's memory", "a number format"],
)  # fmt: skip
def test_the_reason_names_what_does_not_fit(checkpoint, capsys, hardware, options, messages, absent):
    argv = ["--hf-checkpoint", checkpoint("qwen3-235b-a22b"), "--hardware", hardware, *BATCH, *options]
    assert plan(["--search", *argv]) == 2
    text = capsys.readouterr().out.partition("no layout fits:")[2]
    assert all(message in text for message in messages) and absent not in text, text


def test_a_model_that_fits_only_in_one_process_is_found(checkpoint, capsys):
    """Adapters over an INT4 base on 8 x H200; the checkpoint's own code is not needed for the memory."""
    folder = Path(checkpoint("kimi-k2"))
    config = json.loads((folder / "config.json").read_text())
    config.pop("auto_map", None)
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": None, "model_type": "deepseek_v3"})
    )
    argv = ["--hf-checkpoint", str(folder), "--plugins", "lora,int4", "--recompute-activations"]
    argv += ["--train-precision", "int4", "--rollout-precision", "int4", "--lora-target-modules", "all-linear"]
    code, result = run_search(capsys, *argv, "--hardware", "8xH200", "--rollout-max-context-len", "4096")
    assert code == 0 and not result["best"] and result["misfits"]
    (command,) = result["one_process"]
    assert "--lora-base-gpus 8" in command
    prepare(load(shlex.split(command)[2:]), ["hardware=8xH200"])
    for other in (["--engine", "sglang"], ["--sglang-mem-fraction-static", "0.5"]):
        assert not list(find_in_one_process([*argv, *other], ["hardware=8xH200"])), "what the user chose is kept"


@pytest.mark.parametrize(
    ("options", "change"),
    [
        (["--tensor-model-parallel-size", "3"], "--tensor-model-parallel-size 3 -> "),
        (["--rollout-num-gpus", "100"], "--rollout-num-gpus 100 -> "),
        (["--sglang-tp-size", "7"], "--sglang-tp-size 7 -> "),
    ],
)
def test_a_value_that_no_layout_has_is_changed_and_said(checkpoint, capsys, options, change):
    argv = ["--hf-checkpoint", checkpoint("qwen3-235b-a22b"), "--hardware", "64xH200", *BATCH, *options]
    code, result = run_search(capsys, *argv)
    assert code == 0 and result["typed"]["refused"] and result["relaxed"]
    assert any(text.startswith(change) for text in result["best"][0]["changed"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top", "0"], "--top 0: show at least one layout"),
        (["--mean-prompt-len", "0"], "--mean-prompt-len 0 must be between 1 and the longest prompt, 40,960"),
        (["--mean-prompt-len", "nan"], "--mean-prompt-len nan must be"),
        (["--mean-prompt-len", "300", "--rollout-max-prompt-len", "256"], "the longest prompt, 256 tokens"),
        (["--launch", "slurm", "--hours", "0"], "--hours 0: a job needs at least one hour"),
    ],
)
def test_impossible_options_are_refused_before_the_search(options, message, checkpoint, monkeypatch):
    monkeypatch.setattr("miles_planner.search.search", None)  # calling it would fail
    argv = ["--hf-checkpoint", checkpoint("qwen3-4b"), "--hardware", "8xH100", *BATCH, *options]
    with pytest.raises(ConfigError, match=message):
        plan(["--search", *argv])


def test_the_table_says_that_numbers_are_estimates_and_from_where(checkpoint, capsys):
    argv = ["--hf-checkpoint", checkpoint("qwen3-4b"), "--hardware", "8xH100", *BATCH, "--top", "1"]
    assert plan(["--search", *argv]) == 0
    text = capsys.readouterr().out
    assert "estimated: all memory and seconds" in text and "rates.toml" in text and "assumed: prompts of 512" in text
    assert "ETP" not in text and " 1 replicas" not in text, "a dense model has no experts"
