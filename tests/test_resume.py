"""A run that stops and continues equals one that never stopped, bit for bit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from miles_core.checkpoint.directory import check_files, seal
from miles_core.cli.main import main
from miles_core.config.load import load
from miles_core.errors import CheckpointError, ConfigError, DataError
from miles_core.observe.metrics import read
from miles_core.run import checkpoints
from miles_testing.toy import toy_arguments
from miles_tools.samples.files import read_rollouts

OPTIONS = {
    "rollout_shuffle": True,
    "over_sampling_batch_size": 3,
    "dynamic_sampling_filter_path": "nonzero_std",
    "num_steps_per_rollout": 2,
    "lr_decay_style": "cosine",
    "rollout_max_response_len": 6,
}


def numbers(directory):
    """Everything a run measured but the time it took."""
    return [
        {n: v for n, v in record.items() if not n.startswith("time") and "second" not in n}
        for record in read(directory / "metrics.jsonl")
    ]


def tensors(directory, step):
    """Every tensor of a checkpoint, by file and name."""
    root = directory / "checkpoints" / f"step_{step:08d}"
    return {
        (path.relative_to(root).as_posix(), name): tensor
        for path in root.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_two_steps_and_two_more_equal_four(toy_run, tmp_path):
    options = {**OPTIONS, "lr_decay_iters": 8, "plugins": ["r3", "tis"]}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy_run(directory=whole, steps=4, **options)
    toy_run(directory=parts, steps=2, **options)
    assert len(read(parts / "metrics.jsonl")) == 2
    toy_run(directory=None, load=parts, save=None, steps=4, **options)
    assert numbers(whole) == numbers(parts)
    assert same(tensors(whole, 4), tensors(parts, 4))
    state = [json.loads((d / "checkpoints/step_00000004/state/run.json").read_text()) for d in (whole, parts)]
    assert state[0] == state[1] and state[0]["data"]["prompts"]["waiting"]
    kept = list(read_rollouts(whole))
    assert kept == list(read_rollouts(parts)) and len(kept) == len({s["index"] for s in kept})


def test_continuing_from_an_earlier_step_drops_what_came_after(toy_run, tmp_path):
    first = toy_run(directory=tmp_path / "run", steps=4, save_interval=2)
    last = tensors(first.directory, 4)
    again = toy_run(directory=None, save=None, load=first.directory / "checkpoints/step_00000002", steps=4, lr=1e-2)
    assert [record["step"] for record in read(first.directory / "metrics.jsonl")] == [1, 2, 3, 4]
    assert again.directory == first.directory
    # the checkpoint is that of the second branch, trained with another learning rate
    assert not same(tensors(first.directory, 4), last)


def test_a_copy_continues_elsewhere_and_leaves_the_original_alone(toy_run, tmp_path):
    first = toy_run(directory=tmp_path / "first", steps=2)
    before = {p: p.read_bytes() for p in first.directory.rglob("*") if p.is_file()}
    second = toy_run(directory=tmp_path / "second", steps=3, load=first.directory)
    assert [record["step"] for record in second.metrics] == [3]
    assert before == {p: p.read_bytes() for p in first.directory.rglob("*") if p.is_file()}


def test_a_finished_run_has_nothing_to_continue(toy_run, tmp_path):
    first = toy_run(directory=tmp_path / "run", steps=2)
    saved = tensors(first.directory, 2)
    again = {"directory": None, "save": None, "load": first.directory, "steps": 2}
    assert not toy_run(**again).parts
    ending = json.loads((first.directory / "ending.json").read_text())
    assert (ending["why"], ending["step"], ending["of"]) == ("finished", 2, 2)
    assert same(tensors(first.directory, 2), saved) and len(read(first.directory / "metrics.jsonl")) == 2
    assert (first.directory / "run.log").read_text().count(" begins ") == 1
    evaluated = {"eval_prompt_data": first.run.config.data.prompt_data, "eval_interval": 5}
    assert toy_run(**again, **evaluated).parts and not toy_run(**again, **evaluated).parts
    assert toy_run(directory=tmp_path / "other", load=first.directory, steps=2).parts
    assert toy_run(**again, export_hf=tmp_path / "hf").parts and (tmp_path / "hf" / "config.json").exists()
    log = (first.directory / "run.log").read_text()
    assert "continuing with a change: export_hf" not in log
    assert log.count(" begins ") == 1 and log.count("no step follows step 2; ready ") == 2  # an evaluation, an export


def test_the_command_that_a_run_with_a_decay_ends_with_continues_it(toy_run, tmp_path):
    options = {"num_steps_per_rollout": 2, "lr_decay_style": "cosine"}
    first = toy_run(directory=tmp_path / "run", steps=1, **options)
    line = f"to continue: miles train --load {first.directory} --num-rollout N --lr-decay-iters 2\n"
    assert line in (first.directory / "run.log").read_text()
    assert toy_run(directory=None, save=None, load=first.directory, steps=2, lr_decay_iters=2).run.step == 2


def test_what_changed_since_the_checkpoint_is_said(toy_run, tmp_path):
    first = toy_run(directory=tmp_path / "run", steps=1, plugins=["tis"])
    toy_run(directory=None, save=None, load=first.directory, steps=2, lr=2e-3, plugins=["r3"])
    log = (first.directory / "run.log").read_text()
    assert "continuing with a change: train.lr was 0.001, is now 0.002" in log
    assert "continuing with a change: plugin tis was 0.1.0, is now absent" in log


def test_another_model_is_accepted_and_said_not_to_be_trained(toy_run, tmp_path):
    first = toy_run(directory=tmp_path / "run", steps=1)
    model = tmp_path / "copy"
    shutil.copytree(first.run.config.model.hf_checkpoint, model)
    toy_run(directory=None, save=None, load=first.directory, steps=2, hf_checkpoint=model)
    log = (first.directory / "run.log").read_text()
    assert f"is now {model}; the weights that are trained are those of the checkpoint" in log


def test_options_that_do_not_fit_the_checkpoint_are_not_kept(toy_run, tmp_path):
    first = toy_run(directory=tmp_path / "run", steps=1)
    before = [(first.directory / name).read_bytes() for name in ("config.yaml", "plan.json")]
    other = tmp_path / "other.jsonl"
    other.write_text('{"input": "a", "label": "b"}\n')
    again = {"directory": None, "save": None, "load": first.directory, "steps": 2}
    with pytest.raises(DataError, match="cannot resume: the number of prompts was"):
        toy_run(**again, prompt_data=other)
    assert before == [(first.directory / name).read_bytes() for name in ("config.yaml", "plan.json")]
    assert [record["step"] for record in toy_run(**again).metrics][-1] == 2


def test_a_warm_start_is_not_repeated(toy_run, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"input": "a", "response": "bb"}) + "\n")
    options = {"sft_data": pairs, "sft_steps": 3, "sft_lr": 1e-2}
    whole = toy_run(directory=tmp_path / "whole", steps=2, **options)
    parts = toy_run(directory=tmp_path / "parts", steps=1, **options)
    toy_run(directory=None, save=None, load=parts.directory, steps=2, **options)
    assert numbers(whole.directory) == numbers(parts.directory)
    assert same(tensors(whole.directory, 2), tensors(parts.directory, 2))


def test_another_models_checkpoint_is_refused(toy_run, tmp_path):
    first = toy_run(directory=tmp_path / "moe", steps=1)
    with pytest.raises(CheckpointError, match=r"model\.type was qwen3_moe, is now qwen3"):
        toy_run(directory=tmp_path / "dense", family="qwen3", load=first.directory)
    assert not (tmp_path / "dense").exists()


def test_a_directory_holds_one_run(toy_run, tmp_path):
    toy_run(directory=tmp_path / "run", steps=1)
    other = toy_run(directory=tmp_path / "other", steps=1)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="already holds a run; continue it with --load"):
        toy_run(directory=tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run"):
        toy_run(directory=tmp_path / "run", load=other.directory)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_metrics_without_a_checkpoint_are_kept(toy_run, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "metrics.jsonl").write_text('{"step": 1, "time": 0.0}\n')
    with pytest.raises(ConfigError, match="metrics of a run without a checkpoint; choose another directory"):
        toy_run(directory=directory)
    (directory / "metrics.jsonl").write_text("")  # failed before its first step
    assert len(toy_run(directory=directory, steps=1).metrics) == 1


def test_the_directory_alone_is_enough_to_go_on(tmp_path, capsys):
    words = toy_arguments(["tis"], directory=tmp_path / "run", steps=1, log_level="error", tis_clip=1.5)
    assert main(["train", *words]) == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    assert main(["train", "--load", str(tmp_path / "moved/checkpoints/step_00000001"), "--num-rollout", "2"]) == 0
    assert [record["step"] for record in read(tmp_path / "moved/metrics.jsonl")] == [1, 2]
    config = load(["--load", str(tmp_path / "moved"), "--lr", "0.5"])
    assert config.plugins == ("tis",) and config.plugin("tis").clip == 1.5 and config.train.lr == 0.5
    assert config.rollout.batch_size == 2 and config.rollout.num_rollout == 2 and config.run.save is None
    assert load(["--load", str(tmp_path / "moved"), "--plugins", "r3"]).plugins == ("r3",)


def test_checkpoints_written_while_the_run_continues_equal_others(toy_run, tmp_path):
    options = {**OPTIONS, "steps": 4, "save_interval": 1, "plugins": ["r3", "tis"]}
    waiting, later = tmp_path / "waiting", tmp_path / "later"
    toy_run(directory=waiting, **options)
    toy_run(directory=later, async_save=True, **options)
    assert numbers(waiting) == numbers(later)
    for step in range(1, 5):
        assert same(tensors(waiting, step), tensors(later, step))
        assert check_files(later / f"checkpoints/step_{step:08d}")["step"] == step
    again = toy_run(directory=tmp_path / "again", load=later / "checkpoints/step_00000002", **options)
    assert same(tensors(waiting, 4), tensors(again.directory, 4))


def test_a_failure_while_the_run_continues_stops_it_and_leaves_the_earlier_checkpoints(toy_run, tmp_path, monkeypatch):
    def fail(work, step, *rest):
        if step == 2:
            raise OSError(28, "No space left on device")
        return seal(work, step, *rest)

    monkeypatch.setattr(checkpoints, "seal", fail)
    with pytest.raises(CheckpointError, match="the disk is full: saving step 2"):
        toy_run(directory=tmp_path / "run", steps=6, save_interval=1, async_save=True)
    left = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert "step_00000001" in left and "step_00000002" not in left and not [n for n in left if n.startswith(".")]
    monkeypatch.undo()
    toy_run(directory=None, save=None, load=tmp_path / "run", steps=6)
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 6


def test_options_that_no_step_used_do_not_replace_the_saved_ones(toy_run, tmp_path):
    directory = tmp_path / "run"
    toy_run(directory=directory, steps=2)
    saved = [(directory / name).read_bytes() for name in ("config.yaml", "plan.json")]
    again = toy_run(
        directory=None, save=None, load=directory, steps=2, lr=1e-2, dtype="bfloat16"
    )  # nothing is left to do
    assert again.run.step == 2 and saved == [(directory / name).read_bytes() for name in ("config.yaml", "plan.json")]
    toy_run(directory=None, save=None, load=directory, steps=3)


def test_no_plugin_is_suspected_of_a_full_disk(toy_run, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from miles_core.plugin import Plugin, hookimpl\n"
        "plugin = Plugin('mine', 'a hook of the model', '0.1', '~=0.1', hooks={'': 'Hooks'})\n"
        "class Hooks:\n    @hookimpl\n    def on_model(self, model):\n        pass\n"
    )

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "seal", fail)
    with pytest.raises(CheckpointError, match="the disk is full") as caught:
        toy_run(directory=tmp_path / "run", steps=1, plugins=[str(tmp_path / "mine.py")])
    assert "mine" not in str(caught.value)
    with pytest.raises(
        CheckpointError, match=r"before its first checkpoint; start it again with --config .*run/config.yaml"
    ):
        toy_run(directory=None, save=None, load=tmp_path / "run", steps=1)
