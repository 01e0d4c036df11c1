"""Runs without an engine: what they learn, and that their result depends neither on micro-batches nor on an interruption."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from miles_core.config.load import load
from miles_core.plugin import CheckpointError, ConfigError, DataError, PlanError
from miles_core.run.checks import plan_run
from miles_testing import plan, toy_run
from miles_testing.toy import toy_arguments, toy_files

OPTIONS = {
    "custom_rm_path": None,
    "n_samples_per_prompt": None,
    "rollout_max_response_len": None,
    "rollout_batch_size": 4,
}
SFT = {**OPTIONS, "advantage_estimator": "sft", "loss_aggregation": "token_mean"}
DPO = {**OPTIONS, "advantage_estimator": "dpo", "kl_coef": 0.1}
KTO = {**DPO, "advantage_estimator": "kto"}
HEAD = "miles_value_head.weight"
SCORES = {**OPTIONS, "advantage_estimator": "reward_model"}


def say(role, content):
    return {"role": role, "content": content}


@pytest.fixture
def talks(tmp_path):
    rows = [{"messages": [say("user", letter), say("assistant", letter * 3)]} for letter in "abcdef"]
    return write(tmp_path / "talks.jsonl", rows)


@pytest.fixture
def pairs(tmp_path):
    rows = [
        {"prompt": letter, "chosen": letter * 2, "rejected": "xyz"[: 1 + n % 3]} for n, letter in enumerate("abcdef")
    ]
    return write(tmp_path / "pairs.jsonl", rows)


@pytest.fixture
def answers(tmp_path, pairs):
    columns = (("chosen", True), ("rejected", False))
    rows = read(pairs)
    flat = [{"prompt": row["prompt"], "completion": row[c], "label": label} for row in rows for c, label in columns]
    return write(tmp_path / "answers.jsonl", flat)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run):
    return [record["train/loss"] for record in run.metrics]


def weights(directory, step):
    root = directory / "checkpoints" / f"step_{step:08d}"
    return {(path.name, n): t for path in root.rglob("*.safetensors") for n, t in load_file(path).items()}


def test_supervised_training_learns_without_an_engine(talks):
    run = toy_run(
        ["offline"], steps=12, prompt_data=talks, held_out_data=talks, held_out_interval=6, **{**SFT, "lr": 1e-2}
    )
    assert run.engine is None and run.run.policy.version == -1
    found = losses(run)
    assert found[-1] < 0.6 * found[0]
    assert run.metrics[5]["offline/held_out_nll"] < run.metrics[0]["offline/held_out_nll_first"]
    assert not any(name.startswith("sync/") for name in run.metrics[-1])
    (first, *_) = run.samples
    assert first["response"].endswith("<|end|>")


@pytest.mark.parametrize("estimator", ["dpo", "ipo"])
def test_preferences_are_learned(pairs, estimator):
    options = {**DPO, "advantage_estimator": estimator, "lr": 1e-2, "held_out_data": pairs, "held_out_interval": 12}
    run = toy_run(["offline"], steps=12, prompt_data=pairs, **options)
    first, last = run.metrics[0], run.metrics[-1]
    assert last["train/loss"] < 0.8 * first["train/loss"]
    assert "train/ref_kl" not in first and first["offline/margin"] == 0 and last["offline/accuracy"] == 1
    assert first["offline/held_out_accuracy_first"] == 0 and last["offline/held_out_accuracy"] == 1
    assert last["offline/margin"] == pytest.approx(last["offline/reward_chosen"] - last["offline/reward_rejected"])


def test_answers_with_labels_are_learned(answers):
    options = {**KTO, "lr": 1e-2, "held_out_data": answers, "held_out_interval": 12}
    run = toy_run(["offline"], steps=12, prompt_data=answers, **options)
    first, last = run.metrics[0], run.metrics[-1]
    assert first["train/loss"] == pytest.approx(0.5) and last["train/loss"] < 0.3
    assert first["offline/reference"] == 0 and any(record["offline/reference"] > 0 for record in run.metrics)
    assert last["offline/reward_chosen"] > 0.5 and last["offline/reward_rejected"] < -0.5
    assert first["offline/held_out_accuracy_first"] == 0 and last["offline/held_out_accuracy"] == 1


def test_weights_of_labels_scale_the_loss(answers):
    options = {**KTO, "prompt_data": answers, "steps": 1, "kto_desirable_weight": 3.0, "kto_undesirable_weight": 2.0}
    (record,) = toy_run(["offline"], **options).metrics
    assert record["train/loss"] == pytest.approx((3 + 2) / 4)  # half of the rows each, with the loss 0.5


def test_held_out_rows_need_both_labels(answers, tmp_path):
    good = read(answers)[::2]
    held_out = write(tmp_path / "good.jsonl", good)
    with pytest.raises(DataError, match=r"good\.jsonl: all rows have the same label"):
        toy_run(["offline"], prompt_data=answers, held_out_data=held_out, held_out_interval=1, **KTO)


def test_a_reward_model_is_a_classifier_of_transformers(pairs, tmp_path):
    options = {**SCORES, "lr": 1e-2, "held_out_data": pairs, "held_out_interval": 12, "export_hf": tmp_path / "model"}
    run = toy_run(
        ["offline"], tmp_path / "run", steps=12, prompt_data=pairs, center_rewards_coefficient=0.01, **options
    )
    first, last = run.metrics[0], run.metrics[-1]
    assert first["train/loss"] == pytest.approx(math.log(2)) and first["offline/accuracy"] == 0
    assert last["train/loss"] < 0.3 and last["offline/accuracy"] == 1
    assert last["offline/margin"] == pytest.approx(last["offline/reward_chosen"] - last["offline/reward_rejected"])
    assert first["offline/held_out_loss_first"] == pytest.approx(math.log(2))
    assert last["offline/held_out_loss"] < 0.3 and last["offline/held_out_accuracy"] == 1

    model, found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert model.config.num_labels == 1 and not found["missing_keys"] and not found["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = [f"{row[key]}{tokenizer.eos_token}" for row in read(pairs) for key in ("chosen", "rejected")]
    texts = [row["prompt"] + text for row, text in zip(np.repeat(read(pairs), 2), texts, strict=True)]
    scores = model(**tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)).logits[:, 0]
    loss = -torch.nn.functional.logsigmoid(scores[::2] - scores[1::2]).mean()
    assert loss.item() == pytest.approx(last["offline/held_out_loss"], rel=1e-4)

    again = toy_run(["offline"], steps=1, hf_checkpoint=tmp_path / "model", prompt_data=pairs, **SCORES)
    assert again.metrics[0]["offline/accuracy"] == 1  # it starts with the head of the checkpoint


def test_a_margin_raises_the_loss(pairs):
    rows = [row | {"margin": 0.5} for row in read(pairs)]
    (record,) = toy_run(["offline"], steps=1, prompt_data=write(pairs, rows), **SCORES).metrics
    assert record["train/loss"] == pytest.approx(math.log(1 + math.exp(0.5)))


def test_a_classifier_has_one_label_and_predicts_no_tokens(pairs, tmp_path):
    base = toy_files("llama") / "model"
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=2).save_pretrained(tmp_path / "two")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"its score.weight is \[2, 32\], and a reward model has one label"):
        toy_run(["offline"], hf_checkpoint=tmp_path / "two", prompt_data=pairs, **SCORES)
    with pytest.raises(CheckpointError, match=r"it is a classifier .LlamaForSequenceClassification."):
        toy_run(hf_checkpoint=tmp_path / "two")


def test_an_unknown_family_of_classifiers_is_refused(pairs):
    with pytest.raises(ConfigError, match="Transformers has no text classifier with the layers of DeepseekV32"):
        toy_run(["offline"], family="deepseek_v32", prompt_data=pairs, **SCORES)


@pytest.mark.parametrize("options", [SFT, DPO, KTO, SCORES], ids=["sft", "dpo", "kto", "scores"])
def test_micro_batches_change_nothing(talks, pairs, answers, options):
    data = {"sft": talks, "kto": answers}.get(options["advantage_estimator"], pairs)
    whole, split = (
        toy_run(["offline"], steps=3, family="llama", prompt_data=data, micro_batch_size=size, **options)
        for size in (16, 1)
    )
    assert losses(whole) == pytest.approx(losses(split), rel=1e-5)
    norms = ([record["train/grad_norm"] for record in run.metrics] for run in (whole, split))
    assert next(norms) == pytest.approx(next(norms), rel=1e-5)


@pytest.mark.parametrize("options", [SFT, DPO, KTO, SCORES], ids=["sft", "dpo", "kto", "scores"])
def test_two_steps_and_two_more_equal_four(talks, pairs, answers, options, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    data = {"sft": talks, "kto": answers}.get(options["advantage_estimator"], pairs)
    options = {**options, "prompt_data": data, "rollout_shuffle": True}
    toy_run(["offline"], whole, steps=4, **options)
    toy_run(["offline"], parts, steps=2, **options)
    toy_run(["offline"], None, steps=4, **{**options, "load": parts, "save": None})
    one, two = weights(whole, 4), weights(parts, 4)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("options", [SFT, DPO, SCORES], ids=["sft", "dpo", "scores"])
def test_adapters_are_trained_alone(talks, pairs, options, tmp_path):
    data = talks if options is SFT else pairs
    run = toy_run(
        ["lora", "offline"],
        tmp_path / "run",
        steps=6,
        family="llama",
        prompt_data=data,
        lora_rank=4,
        export_hf=tmp_path / "model",
        **{**options, "lr": 2e-2},
    )
    assert losses(run)[-1] < losses(run)[0]
    trained = {name for name, parameter in run.trainer.model.named_parameters() if parameter.requires_grad}
    assert (HEAD in trained) == (options is SCORES) and {*trained} - {HEAD}
    assert all("lora" in name for name in trained - {HEAD})
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert ("score.weight" in exported) == (options is SCORES) and not any("lora" in name for name in exported)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"advantage_estimator": "grpo"}, "the other estimators compare samples of the policy"),
        ({**DPO, "kl_coef": 0.0}, "--kl-coef is the beta of the loss"),
        ({**DPO, "global_batch_size": 2}, "--rollout-batch-size is the number of pairs .kto: rows. per step"),
        ({**KTO, "num_steps_per_rollout": 2}, "log-ratios or scores are computed before the optimizer step"),
        ({**KTO, "rollout_batch_size": 1}, "its reference is estimated with the answers of other rows"),
        ({**KTO, "kl_coef": 0.0}, "--kl-coef is the beta of the loss"),
        ({**KTO, "label_key": "good"}, "for kto prompt, completion and label"),
        ({**DPO, "label_key": "chosen"}, "the columns of a preference are prompt"),
        ({**SCORES, "kl_coef": 0.1}, "a score in place of the probabilities of tokens"),
        ({**SCORES, "global_batch_size": 2}, "log-ratios or scores are computed before the optimizer step"),
        ({**SFT, "prompt_data": None}, "give --prompt-data FILE"),
        ({**SFT, "kl_coef": 0.1}, "use --kl-loss-coef"),
        ({**SFT, "schedule": "async"}, "no engine generates any"),
        ({**SFT, "rollout_top_p": 0.9}, "no engine generates any"),
        ({**SFT, "rollout_max_response_len": 5}, "no engine generates any"),
        ({**SFT, "max_running_requests": 3}, "no engine generates any"),
        ({**SFT, "kv_cache_dtype": "float8_e4m3fn"}, "no engine generates any"),
        ({**SFT, "eval_prompt_data": "x.jsonl", "eval_interval": 1}, "--held-out-data measures the loss on other rows"),
        ({**SFT, "eps_clip": 0.3}, "no ratio to an old policy"),
    ],
)
def test_refused(options, why):
    with pytest.raises(PlanError, match=why):
        plan(["offline"], **{**OPTIONS, **options})


def test_a_refusal_does_not_ask_for_what_the_plugin_provides(talks, tmp_path):
    words = toy_arguments(["offline"], tmp_path / "run", **{**SFT, "prompt_data": talks, "max_running_requests": 3})
    with pytest.raises(PlanError) as refused:
        plan_run(load(words))
    assert "no engine generates any" in str(refused.value) and "independent of the plan" not in str(refused.value)


def test_beta_has_a_default():
    assert plan(["offline"], **{**OPTIONS, **DPO, "kl_coef": None}).fact("algorithm.kl_coef") == 0.1


def test_a_pair_with_equal_tokens_ends_the_run_before_its_model_is_built(pairs, tmp_path):
    rows = pairs.read_text().rstrip("\n").splitlines()
    equal = json.dumps({"prompt": "a", "chosen": "b", "rejected": "b<|end|>"})
    pairs.write_text("\n".join([*rows, equal]) + "\n", encoding="utf-8")
    with pytest.raises(
        DataError, match=rf"jsonl:{len(rows) + 1}: the columns 'chosen' and 'rejected' have the same tokens"
    ):
        toy_run(["offline"], tmp_path / "run", prompt_data=pairs, **DPO)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_row_that_is_too_long_ends_the_run_before_its_model_is_built(talks, tmp_path):
    rows = talks.read_text() + json.dumps({"messages": [say("user", "a"), say("assistant", "b" * 200)]})
    talks.write_text(rows, encoding="utf-8")
    with pytest.raises(DataError, match=r"talks.jsonl:7: with the column 'messages' the row has \d+ tokens"):
        toy_run(["offline"], tmp_path / "run", prompt_data=talks, **SFT)
    shutil.rmtree(tmp_path / "run")
