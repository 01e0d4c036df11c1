"""Whole runs with drafts: beside other plugins, trained or not, stopped and continued."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from miles_core.observe.metrics import read
from miles_core.plugin import CheckpointError, ConfigError, PlanError
from miles_embedded import decoder_layers, load_model
from miles_speculative.head import attach, head_of
from miles_tools.samples.files import read_rollouts

OPTIONS = {"spec_lookahead": 3, "rollout_max_response_len": 12}


def draft_of(model):
    return {name: p.detach().clone() for name, p in head_of(model).parameters.items()}


def policy_of(model):
    draft = {id(p) for p in head_of(model).parameters.values()}
    return {name: p.detach().clone() for name, p in model.named_parameters() if id(p) not in draft}


def differing(one, two):
    """Names of the tensors that only one of the two has, or that are not the same to the bit."""
    return [n for n in one.keys() | two.keys() if n not in one or n not in two or not torch.equal(one[n], two[n])]


def tensors(directory, step):
    root = directory / "checkpoints" / f"step_{step:08d}"
    return {(p.name, n): t for p in root.rglob("*.safetensors") for n, t in load_file(p).items()}


@pytest.mark.parametrize("plugins", [["r3", "tis"], ["cpu_kernels", "zero_copy"]], ids="+".join)
def test_beside_other_plugins(toy_run, toy_model, plugins):
    run = toy_run(["speculative", *plugins], hf_checkpoint=toy_model(), enable_mtp_training=True, **OPTIONS)
    for record in run.metrics:
        assert 0 < record["speculative/accept_rate"] < 1 and 1 < record["speculative/accept_length"] < 4
        assert record["mismatch/abs_log_prob"] < 1e-4 and record["train/mtp"] > 0
        assert record.get("r3/tokens_differing", 0) < 0.02
    # the engine has the trainer's draft, and it is no longer the checkpoint's
    assert not differing(draft_of(run.engine.model), draft_of(run.trainer.model))
    model = load_model(toy_model())
    attach(model, toy_model())
    assert differing(draft_of(model), draft_of(run.engine.model))


#: Some responses are so long that weights change meanwhile.
LONG = """
async def generate(args, sample, sampling_params):
    length = 40 if sample.group_index % 2 else 2
    answer = await args.generate(sample.tokens, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})
    sample.tokens = sample.tokens + answer.tokens
    sample.response, sample.response_length = answer.text, len(answer.tokens)
    return sample
"""


@pytest.mark.parametrize(
    "schedule",
    [
        {"schedule": "ahead"},
        {"fully_async": True, "stale_samples": "train", "pause_generation_mode": "in_place"},
        {"colocate": True, "partial_rollout": True, "over_sampling_batch_size": 4},
    ],
    ids=["ahead", "async", "colocate"],
)
def test_a_push_amid_responses_leaves_them_right(toy_run, toy_model, tmp_path, schedule):
    """The policy hardly moves and its draft does, so what the engine recorded is what the trainer computes, whichever push came between."""
    (tmp_path / "long.py").write_text(LONG)
    given = {**OPTIONS, **schedule, "hf_checkpoint": toy_model(), "custom_generate_function_path": tmp_path / "long.py"}
    given |= {"lr": 1e-9, "draft_lr": 1e-2, "online_sft_interval": 1, "draft_ema_decay": 0.5}
    run = toy_run(["speculative", "r3", "tis"], **given, steps=4)
    for record in run.metrics:
        assert record["mismatch/abs_log_prob"] < 1e-4 and record["r3/tokens_differing"] < 0.02
        assert record["train/draft_kl"] > 0
    assert any(record["rollout/stale_tokens"] > 0.1 for record in run.metrics)
    assert max(record.get("speculative/accept_rate", 0) for record in run.metrics) > 0


def test_a_tree_gives_the_run_without_drafts(toy_run, toy_model):
    given = {
        "hf_checkpoint": toy_model(),
        "rollout_max_response_len": 12,
        "partial_rollout": True,
        "over_sampling_batch_size": 3,
    }
    plain = toy_run(["r3", "tis"], **given)
    tree = toy_run(["speculative", "r3", "tis"], **given, spec_lookahead=2, spec_topk=2)
    assert [s["response"] for s in plain.samples] == [s["response"] for s in tree.samples]
    assert tree.metrics[0]["speculative/accept_length"] > 1
    for one, two in zip(plain.metrics, tree.metrics, strict=True):
        for name in ("r3/tokens_differing", "mismatch/abs_log_prob", "train/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=2e-5)


def test_a_tree_needs_layers_without_windows(toy_run, toy_model):
    with pytest.raises(PlanError, match="draft a chain"):
        toy_run(["speculative"], hf_checkpoint=toy_model("qwen3", window=True), spec_topk=2)


def test_the_policys_gradient_is_the_same_to_the_bit(toy_run, toy_model):
    """With clipping active, over two optimiser steps, in a number format, which quantises the draft too."""
    given = {**OPTIONS, "hf_checkpoint": toy_model(), "steps": 1, "num_steps_per_rollout": 2, "clip_grad": 0.01}
    given |= {"verify_logprobs": True}
    given |= {"train_precision": "int4", "rollout_precision": "int4", "int4_group_size": 16}
    on, off = (toy_run(["speculative"], **given, enable_mtp_training=each) for each in (True, False))
    assert on.metrics[0]["train/grad_norm"] == off.metrics[0]["train/grad_norm"] > 0.01
    assert not differing(policy_of(on.trainer.model), policy_of(off.trainer.model))
    assert differing(draft_of(on.trainer.model), draft_of(off.trainer.model))
    assert on.metrics[0]["train/grad_norm/draft"] > 0
    assert on.metrics[0]["mismatch/abs_log_prob"] < 1e-4


def test_a_stopped_run_continues_to_the_bit(toy_run, toy_model, tmp_path):
    given = {**OPTIONS, "hf_checkpoint": toy_model(), "enable_mtp_training": True, "draft_lr": 1e-2}
    whole, parts, plugins = tmp_path / "whole", tmp_path / "parts", ["speculative", "r3", "tis"]
    toy_run(plugins, directory=whole, steps=3, **given)
    toy_run(plugins, directory=parts, steps=2, **given)
    toy_run(plugins, directory=None, load=parts, save=None, steps=3, **given)
    assert not differing(tensors(whole, 3), tensors(parts, 3))
    assert list(read_rollouts(whole)) == list(read_rollouts(parts))
    rates = [[r["speculative/accept_rate"] for r in read(d / "metrics.jsonl")] for d in (whole, parts)]
    assert rates[0] == rates[1]


def test_a_run_that_generates_ahead_continues_to_the_bit(toy_run, toy_model, tmp_path):
    given = {
        **OPTIONS,
        "hf_checkpoint": toy_model(),
        "enable_mtp_training": True,
        "draft_lr": 1e-2,
        "schedule": "ahead",
    }
    whole, again = tmp_path / "whole", tmp_path / "again"
    toy_run(["speculative"], directory=whole, steps=4, save_interval=2, **given)
    toy_run(["speculative"], directory=again, load=whole / "checkpoints/step_00000002", steps=4, **given)
    assert not differing(tensors(whole, 4), tensors(again, 4))


def test_the_model_keeps_its_own_layers(mtp_checkpoint):
    checkpoint = mtp_checkpoint()
    model = load_model(checkpoint)
    attach(model, checkpoint)
    assert len(decoder_layers(model)) == 2 and len(model.model.layers) == 3


def test_the_running_mean_is_what_the_engine_drafts_with(toy_run, toy_model, tmp_path):
    """Soft targets every second step, a running mean, a new start, stopped and continued."""
    given = {
        **OPTIONS,
        "hf_checkpoint": toy_model(),
        "online_sft_interval": 2,
        "draft_lr": 1e-2,
        "draft_ema_decay": 0.5,
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = toy_run(["speculative"], directory=whole, steps=3, **given, reinit_draft_interval=2)
    assert ["train/draft_kl" in r for r in run.metrics] == [False, True, False]
    toy_run(["speculative"], directory=parts, steps=2, **given, reinit_draft_interval=2)
    again = toy_run(["speculative"], directory=None, load=parts, save=None, steps=3, **given, reinit_draft_interval=2)
    assert not differing(tensors(whole, 3), tensors(parts, 3))
    assert not differing(draft_of(run.engine.model), draft_of(again.engine.model))
    assert not differing(policy_of(run.engine.model), policy_of(run.trainer.model))
    # after two steps: half of what it was, half of what it became
    before = tensors(parts, 2)
    start = load_model(toy_model())
    name = "model.layers.2.eh_proj.weight"
    first = attach(start, toy_model()).parameters["eh_proj.weight"]
    mean = (first + before["model.safetensors", name]) / 2
    torch.testing.assert_close(before["speculative.safetensors", "eh_proj.weight"], mean)


def test_a_trained_draft_comes_closer(toy_run, toy_model):
    given = {"hf_checkpoint": toy_model(), "spec_lookahead": 2, "rollout_max_response_len": 12, "steps": 6, "lr": 1e-9}
    run = toy_run(["speculative"], **given, online_sft_interval=1, draft_lr=1e-2)
    kl = [r["train/draft_kl"] for r in run.metrics]
    assert kl[-1] < 0.8 * kl[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hf_checkpoint": None}, "miles convert --mtp-num-layers 1"),
        ({"spec_lookahead": 0}, "--spec-lookahead"),
        ({"spec_lookahead": 99}, "--spec-lookahead"),
        ({"draft_ema_decay": 0.9}, "--enable-mtp-training"),
        ({"mtp_loss_scaling_factor": 0.3}, "--enable-mtp-training"),
        ({"mtp_num_layers": 2}, "the checkpoint's first"),
        ({"sglang_speculative_num_steps": 2}, "give one of them"),
        ({"sglang_speculative_algorithm": "NGRAM"}, "drafts with an MTP layer"),
        ({"sglang_speculative_algorithm": "STANDALONE"}, "--sglang-speculative-draft-model-path DIR"),
        ({"sglang_speculative_num_draft_tokens": 9}, r"1 \+ 3 x 1"),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(toy_run, toy_model, options, message):
    from miles_testing.toy import toy_files

    given = {"hf_checkpoint": toy_model(), **OPTIONS} | options
    given["hf_checkpoint"] = given["hf_checkpoint"] or toy_files() / "model"
    with pytest.raises((PlanError, ConfigError), match=message):
        toy_run(["speculative"], **given)


def test_what_sglangs_flags_say_holds_for_the_embedded_engine(toy_run, toy_model):
    given = {"hf_checkpoint": toy_model(), "rollout_max_response_len": 12}
    sglang = {"algorithm": "NEXTN", "num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 5}
    run = toy_run(["speculative"], **given, **{f"sglang_speculative_{name}": value for name, value in sglang.items()})
    decoder = run.engine.decoder
    assert decoder.lookahead.choose(1) == 2 and decoder.width == 2


def test_a_family_that_runs_every_layer_is_refused(mtp_checkpoint):
    with pytest.raises(CheckpointError, match="cannot have additional layers"):
        mtp_checkpoint("gpt_oss")


def test_convert_adds_the_layer(tmp_path, capsys):
    from miles_core.cli.main import main
    from miles_testing.toy import toy_files

    words = ["convert", "--mtp-num-layers", "1", "--model-dir", str(toy_files() / "model")]
    assert main([*words, "--save-dir", str(tmp_path / "out")]) == 0
    assert "with an MTP layer" in capsys.readouterr().out
    attach(load_model(tmp_path / "out"), tmp_path / "out")
    assert main(words) == 2 and "needs --save-dir DIR" in capsys.readouterr().err
    assert main([*words[:2], "2", *words[3:], "--save-dir", str(tmp_path / "two")]) == 2
    assert "one layer can be created" in capsys.readouterr().err
