from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace

import pytest

from miles_core.cli import plan, train
from miles_core.errors import CheckpointError, ConfigError
from miles_testing.toy import toy_arguments

PLUGIN = '''
from dataclasses import dataclass
from miles_core.plugin.options import option
from miles_core.plugin.manifest import Plugin

@dataclass(frozen=True)
class Options:
    """What it can do."""
    loudness: int = option(1, flag="--shout-loudness", help="how loud")

plugin = Plugin(name="shout", summary="a pretend plugin", version="1.0", core=">=0", config=Options,
                sets={"rollout.top_k": 7})
'''


@pytest.fixture
def shout(tmp_path) -> str:
    """The path of a single-file plugin that sets an option."""
    path = tmp_path / "shout.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.fixture
def launched(monkeypatch):
    """What ``launch`` was called with, instead of a training."""
    calls = []

    def launch(config, plan, manifests, console=None):
        calls.append(SimpleNamespace(config=config, plan=plan, manifests=manifests, frozen=gc.get_freeze_count()))
        gc.unfreeze()
        return SimpleNamespace(signal=0)

    module = ModuleType("miles_core.launch")
    module.launch = launch
    monkeypatch.setitem(sys.modules, "miles_core.launch", module)
    return calls


def test_the_short_help_fits_on_two_screens_and_lists_the_sections(capsys, shout):
    assert train.run(["--plugins", shout, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: miles train") and len(text.splitlines()) <= 80
    assert "--hf-checkpoint DIR" in text and "--dry-run" in text and "--help-all" in text
    assert " shout" in text and "--shout-loudness" not in text
    assert "--wandb-group" not in text and "  rollout         " in text


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        (["--help-all"], ("shout (plugin shout):", "--shout-loudness N", "--dry-run", "--wandb-group"), ()),
        (["--help", "shout"], ("shout (plugin shout):", "--shout-loudness N"), ("--lr", "--config")),
        (["--help", "sft", "model"], ("sft:", "--sft-lr X", "model:", "--bf16"), ("--adam-eps", "--sft-lr-")),
        (["-h", "loud"], ("--shout-loudness N",), ("--sft-lr",)),
        (["--help", "run"], ("--fully-async", "on; --no-save-rollouts turns it off"), ("--rollout-top-p",)),
        (["--help", "save_rollouts"], ("--save-rollouts ", "--save-rollouts-size"), ("--save-interval",)),
    ],
)
def test_help_shows_a_section_a_plugin_or_what_a_search_finds(capsys, shout, words, shown, hidden):
    assert train.run(["--plugins", shout, *words]) == 0
    text = capsys.readouterr().out
    assert [part for part in shown if part not in text] == []
    assert [part for part in hidden if part in text] == []


def test_a_search_in_the_help_that_finds_nothing_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"--help rollot: no section, plugin or flag.*did you mean rollout"):
        train.run(["--help", "rollot"])


def test_a_dry_run_prints_the_plan_and_builds_nothing(capsys, shout, launched, tmp_path):
    words = toy_arguments([shout], directory=tmp_path / "run")
    assert train.run([*words, "--dry-run", "--shout-loudness", "3"]) == 0
    text = capsys.readouterr().out
    assert "shout" in text and "rollout.top_k = 7" in text
    assert launched == [] and not (tmp_path / "run").exists()


def test_a_dry_run_says_all_that_would_end_the_run_later(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export/there").touch()
    options = {
        "prompt_data": tmp_path / "none.jsonl",
        "custom_rm_path": tmp_path / "none.py",
        "custom_generate_function_path": tmp_path / "gone.py",
        "dynamic_sampling_filter_path": tmp_path / "filter.py",
        "eval_prompt_data": f"held={tmp_path}/eval.jsonl",
        "eval_interval": 1,
        "sft_data": tmp_path / "pairs.jsonl",
        "export_hf": tmp_path / "export",
        "load": tmp_path / "nothing",
    }
    with pytest.raises(ConfigError, match="7 problems") as caught:
        train.run([*toy_arguments(directory=tmp_path / "run", **options), "--dry-run"])
    for name in ("none.jsonl", "none.py", "gone.py", "filter.py", "eval.jsonl", "export", "nothing"):
        assert name in str(caught.value)


def test_a_run_gets_the_configuration_with_what_plugins_set(shout, launched, model_directory):
    assert train.run(["--plugins", shout, "--hf-checkpoint", model_directory, "--prompt-data", "p.jsonl"]) == 0
    (call,) = launched
    assert call.config.rollout.top_k == 7 and call.config.origin("rollout.top_k") == "set by shout"
    assert call.config.plugins == call.plan.order == ("shout", "embedded")
    assert call.manifests["shout"].version == "1.0"
    assert call.frozen > 0  # the search for garbage before the first step does not visit the modules


def test_a_run_that_was_stopped_exits_with_130(monkeypatch, launched, model_directory):
    stopped = SimpleNamespace(signal=2)
    monkeypatch.setattr(sys.modules["miles_core.launch"], "launch", lambda *a: stopped)
    assert train.run(["--hf-checkpoint", model_directory, "--prompt-data", "p.jsonl"]) == 130


def test_what_a_run_cannot_do_without_is_said_before_anything_is_made(launched, model_directory):
    with pytest.raises(
        ConfigError, match=r"needs --hf-checkpoint DIR[\s\S]*needs --prompt-data FILE[\s\S]*no reward is chosen"
    ):
        train.run(["--dry-run"])
    with pytest.raises(CheckpointError, match="--hf-checkpoint /no/such/place"):
        train.run(["--hf-checkpoint", "/no/such/place", "--prompt-data", "p.jsonl"])
    assert launched == []


@pytest.fixture
def model_directory(tmp_path) -> str:
    """A directory that holds a model's config.json and nothing else."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 4, "num_hidden_layers": 2}')
    return str(directory)


def test_a_directory_that_is_no_run_is_told_as_that(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--load .*: it holds no config.yaml, so it is not a complete run directory"
    ) as caught:
        train.run(["--load", str(tmp_path)])
    assert "needs --prompt-data" not in str(caught.value) and "no reward" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [train, plan])
def test_a_run_that_ended_before_its_first_checkpoint_is_not_continued(command, tmp_path):
    (tmp_path / "config.yaml").write_text("model: {hf_checkpoint: model}")
    with pytest.raises(ConfigError, match=r"before its first checkpoint; start it again with --config .*/config.yaml"):
        command.run(["--load", str(tmp_path)])
    with pytest.raises(ConfigError, match="no such directory"):
        command.run(["--load", str(tmp_path / "absent")])
    assert not (tmp_path / "absent").exists()
