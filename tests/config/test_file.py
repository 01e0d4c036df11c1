from __future__ import annotations

import pytest

from miles_core.config.load import load
from miles_core.errors import ConfigError


def refused(loaded, path) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded("--config", path)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "rollout: {batch_size: 7}",
        "rollout-batch-size: 7",
        "rollout_batch_size: 7",
        "--rollout-batch-size: 7",
        "rollout: {rollout_batch_size: 7}",
        "rollout.batch_size: 7",
        "rollout: {batch-size: '7'}",
    ],
)
def test_tables_and_flat_flags_are_both_accepted(loaded, written, text):
    assert loaded("--config", written(text)).rollout.batch_size == 7


def test_toml(loaded, written):
    path = written('lr = 1e-4\nplugins = ["replay"]\n\n[rollout]\ntop_k = 3\n\n[replay]\nbuffer_size = 5\n', "run.toml")
    config = loaded("--config", path)
    assert (config.train.lr, config.rollout.top_k, config.plugin("replay").buffer_size) == (1e-4, 3, 5)
    assert config.origin("rollout.top_k") == f"{path} line 5"


def test_values_keep_their_yaml_types(loaded, written):
    path = written(
        "lr: 1e-6\nmodel_name: 7\nrollout_shuffle: yes\nlabel_key: null\nrollout_stop: ['a,b', c]\nsave: runs/x"
    )
    config = loaded("--config", path)
    assert config.train.lr == 1e-6 and config.model.model_name == "7" and config.data.shuffle is True
    assert config.data.label_key is None and config.rollout.stop == ("a,b", "c") and str(config.run.save) == "runs/x"


def test_an_empty_file_changes_nothing(loaded, written):
    for text in ("# nothing\n", "train:\n  # lr: 1\n"):
        assert loaded("--config", written(text)) == loaded()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rollout:\n  batch_siz: 7", "line 2: the table rollout has no key 'batch_siz'; did you mean batch_size"),
        ("rollout:\n  lr: 7", "the table rollout has no key 'lr'; there is train.lr"),
        ("a: 1\nrolout:\n  batch_size: 7", "line 2: unknown table 'rolout'; did you mean rollout"),
        ("\nrollout_batch_siz: 7", "line 2: unknown key rollout_batch_siz; did you mean --rollout-batch-size"),
        ("tis:\n  threshold: 2", "line 1: unknown table 'tis'; tables are run, model, "),
        ("rollout: {batch_size: many}", "line 1: rollout.batch_size cannot be 'many'; it must be a whole number >= 1"),
        ("rollout: {batch_size: true}", "cannot be True"),
        ("rollout_shuffle: 3", "it must be true or false"),
        ("lr: 1\nlr: 2", "line 2: lr is defined twice (also in line 1)"),
        ("lr: [1", "line 1: malformed YAML"),
        ("a: b: c", "line 1: malformed YAML"),
        ("- lr", "must be a mapping of keys to values, not a single list"),
        ("rollout_small: fast", "sets fixed values; write true"),
        ("rollout_small:", "sets fixed values; write true"),
        ("rollout:\n  batch_size:", "line 2: rollout.batch_size has no value; write a whole number >= 1"),
        ("? [a]\n: 1", "a key must be a name"),
        ("when: 2020-99-99", "unknown key when"),
        ("engine: [a]", "line 1: engine cannot be ['a']; it is one of"),
        ("rollout: {batch_size: {a: 1}}", "rollout.batch_size cannot be {'a': 1}"),
        ("save: {a: x, b: y}", "it must be a text"),
        ("&a {rollout: *a}", "an anchor in it holds itself"),
        ("rollout: " + "{a: " * 3000, "nested too deeply"),
        ("lr: \x00", "malformed YAML"),
    ],
)
def test_a_wrong_file_is_a_sentence_with_file_and_line(loaded, written, text, says):
    path = written(text)
    message = refused(loaded, path)
    assert says in message and path in message


def test_a_file_with_a_name_is_that_file(loaded, written):
    config = loaded(
        "--config",
        written("prompt_data: {sums: a.jsonl}\neval_prompt_data: {hard: b.jsonl, easy: c.jsonl}\neval_interval: 1"),
    )
    assert config.data.prompt_data == "a.jsonl" and config.evaluation.prompt_data == ("hard=b.jsonl", "easy=c.jsonl")


def test_malformed_toml_names_the_line(loaded, written):
    assert "malformed TOML" in (message := refused(loaded, written("lr = \n", "run.toml"))) and "line 1" in message


def test_a_missing_file_and_an_unknown_ending(loaded, written, tmp_path):
    assert "No such file" in refused(loaded, tmp_path / "none.yaml")
    assert "must end in .yaml" in refused(loaded, written("lr: 1", "run.txt"))


def test_aliases_in_files(loaded, written):
    assert loaded("--config", written("rollout_small: true")).rollout.precision == "small"
    assert loaded("--config", written("rollout_small: false")).rollout.precision == "bf16"


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("seed: 010", "train.seed", 10),
        ("seed: 0o10", "train.seed", 8),
        ("seed: 1_000", "train.seed", 1000),
        ("lr: 1e-6", "train.lr", 1e-6),
        ("label_key: yes", "data.label_key", "yes"),
        ("label_key: on", "data.label_key", "on"),
        ("label_key: 1:30", "data.label_key", "1:30"),
        ("label_key: 2024-01-01", "data.label_key", "2024-01-01"),
        ("model_name: 1.10", "model.model_name", "1.10"),
        ("model_name: 010", "model.model_name", "010"),
        ("model_name: 1e3", "model.model_name", "1e3"),
        ("shuffle: yes", "data.shuffle", True),
    ],
)
def test_a_plain_value_means_what_it_means_as_a_flag(tmp_path, line, path, value):
    file = tmp_path / "run.yaml"
    file.write_text(f"{path.partition('.')[0]}:\n  {line}\n")
    config = load(["--config", str(file)], manifests=[], environment={})
    assert config.get(path) == value and type(config.get(path)) is type(value)
    flag, text = config.schema.options[path].flag, line.partition(": ")[2]
    if "0o" not in text and value is not True:  # Python's int has no octal without a prefix; switches take no value
        assert load([f"{flag}={text}"], manifests=[], environment={}).get(path) == value
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load(["--config", str(again)], manifests=[], environment={}).get(path) == value


def test_a_sexagesimal_number_is_refused_where_a_number_is_needed(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  seed: 1:30\n")
    with pytest.raises(ConfigError, match=r"run.yaml line 2: train.seed cannot be '1:30'; it must be a whole number"):
        load(["--config", str(file)], manifests=[], environment={})
