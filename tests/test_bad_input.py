"""What a user gets wrong: one clear sentence on stderr, exit code 2, no traceback, and nothing saved before is harmed."""

from __future__ import annotations

import errno
import json

import pytest

from miles_core.cli.main import main
from miles_testing.toy import toy_arguments, toy_files


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """``refused(**options)`` runs ``miles train`` with them and returns the message it was refused with."""
    monkeypatch.delenv("MILES_DEBUG", raising=False)
    options_of_toy = {"directory": tmp_path / "run", "log_level": "error"}

    def call(*words, plugins=(), **options):
        capsys.readouterr()
        code = main(["train", *toy_arguments(plugins, **{**options_of_toy, **options}), *words])
        text = capsys.readouterr().err
        assert code == 2, text
        assert text.count("error:") == 1 and "error: " in text and "Traceback" not in text, text
        return text[text.index("error: ") + 7 :].strip()

    return call


@pytest.fixture
def file(tmp_path):
    """``file(name, text)`` -> its path."""

    def write(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_a_checkpoint_that_is_not_there(refused):
    assert "--hf-checkpoint /no/such/model" in refused(hf_checkpoint="/no/such/model")


def test_a_checkpoint_without_or_with_a_broken_config(refused, tmp_path):
    (tmp_path / "model").mkdir()
    assert "config.json" in refused(hf_checkpoint=tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{")
    assert "config.json" in refused(hf_checkpoint=tmp_path / "model")


def copied_model(tmp_path):
    import shutil

    return shutil.copytree(toy_files() / "model", tmp_path / "model")


def test_a_checkpoint_without_a_tokenizer(refused, tmp_path):
    model = copied_model(tmp_path)
    for path in model.glob("*token*"):
        path.unlink()
    assert f"--hf-checkpoint {model}: there is no tokenizer in it" in refused(hf_checkpoint=model)


@pytest.mark.parametrize(
    "entry",
    [
        {"layer_types": "full_attention"},
        {"rope_parameters": [1]},
        {"dtype": "float7"},
        {"hidden_act": "nope"},
        {"num_attention_heads": 0},
    ],
)
def test_a_config_that_transformers_refuses_in_a_way_of_its_own(refused, tmp_path, entry):
    path = copied_model(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entry}))
    assert f"--hf-checkpoint {path.parent}: " in refused(hf_checkpoint=path.parent)


def test_a_checkpoint_whose_weights_are_missing_or_cut_off(refused, tmp_path):
    model = copied_model(tmp_path)
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    assert str(model) in refused(hf_checkpoint=model)
    weights.unlink()
    assert str(model) in refused(hf_checkpoint=model)


def test_prompts_that_are_missing_malformed_or_empty(refused, file):
    assert "/no/such/prompts.jsonl" in refused(prompt_data="/no/such/prompts.jsonl")
    broken = file("broken.jsonl", '{"input": "a"}\n{"input": \n')
    assert f"{broken}:2" in refused(prompt_data=broken)
    assert "empty" in refused(prompt_data=file("empty.jsonl", ""))
    assert "not .csv" in refused(prompt_data=file("prompts.csv", "input\na\n"))
    assert "parquet" in refused(prompt_data=file("prompts.parquet", "not parquet"))


def test_keys_that_no_row_has(refused):
    assert "--input-key from: 'input', 'label'" in refused(input_key="question")
    assert "--label-key from: 'input', 'label'" in refused(label_key="answer")


def test_metadata_that_no_row_has(refused, file):
    rows = file("rows.jsonl", '{"input": "a", "label": "1", "info": {"how": "turn"}}\n{"input": "b", "label": "1"}\n')
    options = {"prompt_data": rows, "eval_prompt_data": rows, "eval_interval": 1}
    message = refused(metadata_key="extra", **options)
    assert message.startswith("--metadata-key extra: no row has an entry there (the 4 rows of the prompt files)")
    assert "--generate-key kind: no row has this entry in its metadata, which has how" in refused(
        metadata_key="info", generate_key="kind", **options
    )
    # a column of the evaluation alone has an effect
    bare = file("bare.jsonl", '{"input": "a", "label": "1"}\n')
    options = {**options, "prompt_data": bare, "metadata_key": "info", "generate_key": "how", "max_restarts": -1}
    assert "metadata" not in refused(**options)


@pytest.mark.parametrize("rule", ["exact", "boxed", "f1", "math"])
def test_labels_that_no_response_equals(refused, file, rule):
    good, bad = {"input": "a", "label": "1"}, {"input": "a", "label": {"ground_truth": "2", "style": "rule"}}
    rows = file("labels.jsonl", "".join(json.dumps(row) + "\n" for row in (good, bad)))
    options = {"custom_rm_path": None, "rm_type": rule, "label_key": "label"}
    expected = f"{rows}:2: the label is {{'ground_truth': '2', 'style': 'rule'}}, a mapping with the entries 'ground_truth', 'style'"
    assert expected in refused(prompt_data=rows, **options)
    assert expected in refused(prompt_data=f"{rows}@[:1]", eval_prompt_data=rows, eval_interval=1, **options)
    nested = file("nested.jsonl", json.dumps({"input": "a", "label": [["1"]]}) + "\n")
    assert f"{nested}:1: the label [['1']] holds ['1'] (list)" in refused(prompt_data=nested, **options)


def test_a_prompt_longer_than_the_context(refused, file):
    long = file("long.jsonl", json.dumps({"input": "a"}) + "\n" + json.dumps({"input": "a" * 200}) + "\n")
    text = refused(prompt_data=long)
    assert "128" in text and "200" in text, text
    text = refused(prompt_data=long, rollout_max_context_len=50)
    assert "--rollout-max-context-len" in text and f"{long}:2" in text
    assert "--rollout-max-prompt-len 0" in refused(prompt_data=long, rollout_max_prompt_len=0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise KeyError('answer')", "raised KeyError on sample 0: 'answer'"),
        ("return float('nan')", "nan"),
        ("return 'good'", "good"),
        ("return {'accuracy': 1.0}", "--reward-key"),
    ],
    ids=["raises", "nan", "text", "dict"],
)
def test_a_reward_that_is_none(refused, file, body, expected):
    path = file("judge.py", f"async def judge(args, sample):\n    {body}\n")
    text = refused(custom_rm_path=f"{path}:judge")
    assert expected in text and "judge" in text and "sample 0" in text, text


def test_reward_functions_that_cannot_be_loaded(refused, file):
    assert "no reward is chosen" in refused(custom_rm_path=None)
    assert "there is no file /no/such.py" in refused(custom_rm_path="/no/such.py")
    path = file("judge.py", "def judge(sample):\n    return 0\n")
    assert "has no function 'reward'" in refused(custom_rm_path=path)
    assert "cannot be called as judge(args, sample)" in refused(custom_rm_path=f"{path}:judge")
    assert "SyntaxError" in refused(custom_rm_path=file("typo.py", "def reward(:\n"))


def test_a_full_disk_while_saving_keeps_the_earlier_checkpoint(refused, tmp_path, monkeypatch):
    from miles_core.observe.metrics import read
    from miles_embedded.trainer import checkpoint as state

    plain, calls = state.save, []

    def save(model, optimizer, directory, world):
        calls.append(directory)
        plain(model, optimizer, directory, world)
        if len(calls) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state, "save", save)
    text = refused(save_interval=1, steps=3)
    assert "the disk is full: saving step 2" in text and "earlier checkpoints there are untouched" in text
    assert " are free" not in text  # a number of free bytes above the needed ones contradicts the message
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001"]
    monkeypatch.setattr(state, "save", plain)
    words = toy_arguments(directory=None, save=None, load=tmp_path / "run", steps=3, log_level="error")
    assert main(["train", *words]) == 0
    assert [record["step"] for record in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("saved", [True, False], ids=["samples", "checkpoints"])
def test_a_lost_file_system_ends_the_run_instead_of_moving_it_to_the_local_disk(refused, tmp_path, monkeypatch, saved):
    from miles_core.run.checkpoints import RunCheckpoints

    plain = RunCheckpoints.commit

    async def commit(self):
        await plain(self)
        if self.run.step == 2:  # as after umount --lazy: the mount point is there and empty
            await self.complete()
            (tmp_path / "run").rename(tmp_path / "elsewhere")

    monkeypatch.setattr(RunCheckpoints, "commit", commit)
    text = refused(save_interval=1, steps=5, save_rollouts=saved)
    assert "step 3" in text and "the run's directory is gone (a lost file system?)" in text
    assert "delete the directory" not in text and not (tmp_path / "run" / "checkpoints").exists()
    kept = tmp_path / "elsewhere"
    words = toy_arguments(directory=None, save=None, load=kept, steps=5, log_level="error", save_rollouts=saved)
    monkeypatch.setattr(RunCheckpoints, "commit", plain)
    assert main(["train", *words]) == 0 and (kept / "checkpoints" / "step_00000005").is_dir()


def test_a_run_directory_that_cannot_be_made(refused, file):
    blocker = file("blocker", "")
    assert f"--save {blocker / 'run'}: the directory cannot be made" in refused(directory=blocker / "run")


def test_an_existing_run_is_not_overwritten(refused, tmp_path):
    assert main(["train", *toy_arguments(directory=tmp_path / "run", steps=1, log_level="error")]) == 0
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert f"continue it with --load {tmp_path / 'run'}" in refused()
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_checkpoints_that_cannot_be_continued(refused, tmp_path):
    assert "--load /no/such/run: no such directory" in refused(load="/no/such/run")
    assert main(["train", *toy_arguments(directory=tmp_path / "first", steps=1, log_level="error")]) == 0
    file = tmp_path / "first/checkpoints/step_00000001/policy/trainer/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "policy/trainer/model.safetensors changed" in refused(load=tmp_path / "first")
    file.write_bytes(data[:-10])
    assert "policy/trainer/model.safetensors has" in refused(load=tmp_path / "first")


def test_plugins_that_are_broken(refused, file):
    assert "no plugin 'nothing' is installed; `miles plugins` lists" in refused(plugins=["nothing"])
    assert "did you mean nvfp4?" in refused(plugins=["nvfp"])
    assert "no such file" in refused(plugins=["./nothing.py"])
    text = refused(plugins=[str(file("empty_plugin.py", "x = 1\n"))])
    assert "no manifest called 'plugin' and nothing marked with miles_core.plugin.hookimpl" in text
    head = "from miles_core.plugin import hookimpl\n\n@hookimpl\n"
    assert "on_stepp" in refused(plugins=[str(file("misspelt.py", f"{head}def on_stepp(run):\n    pass\n"))])
    assert "metric" in refused(plugins=[str(file("argument.py", f"{head}def on_step(run, metric):\n    pass\n"))])
    text = refused(plugins=[str(file("wrapper.py", f"{head}def wrap_loss(run):\n    return 3\n"))])
    assert "wrap_loss returned 3, not a function" in text


def test_a_plugin_that_cannot_be_imported_is_one_line(file, capsys):
    path = file("faulty.py", "import no_such_module_at_all\n")
    assert main(["train", *toy_arguments([str(path)])]) == 2
    text = capsys.readouterr().err
    assert (
        f"--plugins {path}: the file cannot be imported" in text and "No module named 'no_such_module_at_all'" in text
    )
    assert "Traceback" not in text


def test_wrong_flags(refused, file):
    assert "--rollout-batch-size" in refused(rollout_batch_size=0)
    assert "--lr" in refused(lr="fast")
    assert "below 2**63" in refused(seed=99999999999999999999)
    assert "<= 100000" in refused(n_samples_per_prompt=10**12)
    assert "with a single sample they are all 0" in refused(n_samples_per_prompt=1)
    assert "--model-name ../../x" in refused(model_name="../../x", directory=None, save=None)
    assert "--rollout-temperature" in refused(rollout_temprature=1.0)  # the nearest spelling
    assert "over_sampling_batch_size must be >= rollout.batch_size" in refused(over_sampling_batch_size=1)
    assert "run.yaml" in refused("--config", str(file("run.yaml", "rollout: [")))
    assert "batch_size" in refused("--config", str(file("other.yaml", "rollout: {batch_sise: 3}\n")))


def test_a_combination_that_cannot_work_is_refused_with_the_reason(refused):
    text = refused(plugins=["r3"], family="qwen3")
    assert "there is no router to replay in a dense model" in text and "drop r3" in text


def test_a_refused_plan_and_wrong_inputs_are_told_together(refused, file, tmp_path):
    text = refused(
        plugins=["r3"],
        rollout_top_p=0.5,
        prompt_data="/no/prompts.jsonl",
        custom_rm_path="/no/reward.py:f",
        export_hf=file("taken", ""),
        hf_checkpoint=toy_files("llama") / "model",
    )
    assert "this run cannot start (1 problem)" in text and "r3 needs" in text
    assert "/no/prompts.jsonl" in text and "/no/reward.py" in text and "--export-hf" in text
    assert not (tmp_path / "run").exists()


def test_a_plan_says_no_to_a_model_that_a_format_cannot_store(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("MILES_DEBUG", raising=False)
    model = toy_files(hidden_size=40) / "model"
    words = ["--hf-checkpoint", str(model), "--rollout-int4", "--int4-group-size", "32", "--emulate-precision"]
    assert main(["plan", *words]) == 2
    assert "int4" in capsys.readouterr().err


def test_generate_functions_that_cannot_be_loaded(refused, file):
    path = file("turns.py", "def generate(args, sample, sampling_params):\n    return sample\n")
    assert "generate must be async" in refused(custom_generate_function_path=path)


def test_commands_that_do_not_exist(capsys):
    assert main(["trian"]) == 2
    assert "did you mean miles train?" in capsys.readouterr().err


def test_a_defect_keeps_its_traceback(tmp_path, file):
    path = file("defect.py", "from miles_core.plugin import hookimpl\n\n@hookimpl\ndef on_step(run):\n    1 / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        main(["train", *toy_arguments([str(path)], directory=tmp_path / "run")])
    where, ending = caught.value.__notes__
    assert where == "in plugin defect, hook on_step"
    # the step was trained, so it is kept, and the last lines say so
    assert f"checkpoint: {tmp_path}/run/checkpoints/step_00000001" in ending and "miles train --load" in ending


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sample.tokens = [*sample.tokens, 10**6]", "has the token 1000000; token ids are 0 to"),
        ("sample.rollout_log_probs = [float('nan')] * sample.response_length", "has the log-probability nan"),
        ("raise ValueError('boom')", "on sample 0: it raised ValueError: boom"),
        ("raise SystemExit(3)", "on sample 0: it called sys.exit(3)"),
    ],
    ids=["token", "log-prob", "error", "exit"],
)
def test_what_a_generate_function_must_not_return(refused, file, line, expected):
    path = file(
        "turn.py",
        "async def generate(args, sample, sampling_params):\n"
        "    answer = await args.generate(sample.tokens, sampling_params)\n"
        "    sample.tokens, sample.response_length = sample.tokens + answer.tokens, len(answer.tokens)\n"
        f"    {line}\n    return sample\n",
    )
    text = refused(custom_generate_function_path=path)
    assert expected in text and str(path) in text, text


def test_texts_of_users_functions_that_are_no_valid_unicode(tmp_path, capsys):
    """Half a surrogate pair and NUL in what a generate function tokenizes, returns and keeps, and in the names of a reward."""
    (tmp_path / "mine.py").write_text(
        "async def generate(args, sample, sampling_params):\n"
        "    tokens = args.tokenizer.encode('1 \\ud800 \\x00') + sample.tokens\n"
        "    answer = await args.generate(tokens)\n"
        "    sample.tokens, sample.response_length = tokens + answer.tokens, len(answer.tokens)\n"
        "    sample.response, sample.metadata = '\\udc00\\x1b[2J', {'k\\ud800': 'v\\udfff'}\n"
        "    return sample\n\n"
        "def reward(args, sample):\n"
        "    return {'a\\ud800': 1.0, 'b': float(sample.index % 2)}\n"
    )
    mine = tmp_path / "mine.py"
    options = {"custom_generate_function_path": mine, "custom_rm_path": mine, "reward_key": "b", "save_interval": 1}
    assert main(["train", *toy_arguments(directory=tmp_path / "run", steps=1, **options)]) == 0
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "reward/part/a\ufffd" in (tmp_path / "run/metrics.jsonl").read_text().encode().decode("unicode-escape")
