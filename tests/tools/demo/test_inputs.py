import json

import pytest

from miles_core.config.load import load
from miles_core.errors import ConfigError
from miles_core.plugin.discovery import discover
from miles_core.plugin.manifest import Plugin
from miles_tools.demo.inputs import make_inputs, plugins_shown, train_arguments


def test_the_demos_settings_are_a_valid_configuration(tmp_path):
    config = load(train_arguments(tmp_path, 7, ()), manifests=())
    assert config.train.seed == 7
    assert config.run.plugins == ()
    assert config.evaluation.temperature == 1
    assert config.sft.data == str(tmp_path / "data" / "demonstrations.jsonl")


def test_further_flags_win(tmp_path):
    config = load(train_arguments(tmp_path, 0, (), ["--num-rollout", "3", "--lr", "1e-4"]), manifests=())
    assert (config.rollout.num_rollout, config.train.lr) == (3, 1e-4)


def test_plugins_that_show_themselves_are_used_unless_the_user_chose(tmp_path):
    made = {name: Plugin(name, "", "1", ">=0", demo=name != "b") for name in "abc"}
    assert plugins_shown(made) == ["a", "c"]
    assert train_arguments(tmp_path, 0, ["a", "c"])[-2:] == ["--plugins", "a,c"]
    assert "a,c" not in train_arguments(tmp_path, 0, ["a", "c"], ["--plugins", "b"])
    assert "a,c" not in train_arguments(tmp_path, 0, ["a", "c"], ["--plugins=b"])


def test_the_demo_trains_with_what_this_repository_recommends():
    assert plugins_shown(discover()) == ["r3", "tis"]


def test_a_directory_with_a_run_is_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="already holds a run"):
        make_inputs(tmp_path, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the demo's model and data"):
        make_inputs(tmp_path / "file", 0)


def test_on_a_gpu_there_are_fewer_larger_steps_and_flags_override_them(tmp_path):
    host, gpu = (load(train_arguments(tmp_path, 0, (), gpu=on), manifests=()) for on in (False, True))
    assert gpu.sft.steps < host.sft.steps and gpu.sft.batch_size > host.sft.batch_size
    assert gpu.rollout.num_rollout < host.rollout.num_rollout and gpu.reward == host.reward
    assert (
        load(train_arguments(tmp_path, 0, (), ["--num-rollout", "3"], gpu=True), manifests=()).rollout.num_rollout == 3
    )


def test_on_a_gpu_the_model_is_wider(tmp_path):
    counts, widths = [], []
    for gpu in (False, True):
        counts.append(make_inputs(tmp_path / str(gpu), 0, gpu))
        widths.append(json.loads((tmp_path / str(gpu) / "model" / "config.json").read_text())["hidden_size"])
    assert widths[0] < widths[1] and counts[0] < counts[1] == 593_344
