"""Scores of a classifier as rewards: their values, what is refused, and that a policy learns them."""

import asyncio
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from miles_core.data import Sample, Status
from miles_core.plugin import CheckpointError, ConfigError, DataError, MilesError, PlanError
from miles_reward_model.classifier import Classifier, check_lengths
from miles_reward_model.reward import complete, find_device, make_reward
from miles_testing import plan, toy_run
from miles_testing.toy import toy_classifier, toy_files

OPTIONS = {"rm_type": "model", "custom_rm_path": None, "family": "llama"}


@pytest.fixture
def directory(tmp_path):
    """A copy of a classifier, which a test may change."""
    return shutil.copytree(toy_classifier(), tmp_path / "model")


def edit(path, **entries):
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.fixture(scope="module")
def prefers_a(tmp_path_factory):
    """A reward model that learned to prefer answers of many a."""
    folder = tmp_path_factory.mktemp("preferences")
    rows = [
        {"prompt": prompt, "chosen": "a" * (1 + n), "rejected": other * (1 + n)}
        for prompt in "abcdefgh"
        for n in range(4)
        for other in "bxyz"
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"advantage_estimator": "reward_model", "lr": 1e-2, "rollout_batch_size": 8, "rollout_shuffle": True}
    without = dict.fromkeys(("custom_rm_path", "n_samples_per_prompt", "rollout_max_response_len"))
    data = {"prompt_data": folder / "pairs.jsonl", "export_hf": folder / "model"}
    run = toy_run(["offline"], folder / "run", steps=12, family="llama", **options, **without, **data)
    assert run.metrics[-1]["offline/accuracy"] == 1
    return folder / "model"


def test_scores_are_those_of_transformers_for_every_batch():
    path = toy_classifier()
    texts = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14], [5, 6]]
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = [float(model(torch.tensor([text])).logits[0, 0]) for text in texts]
    for limit in (1, 8, 1000):
        found = Classifier(path, "cpu", torch.float32, limit).score(texts)
        assert found == pytest.approx(expected, abs=1e-5)
    assert len({*expected}) == len(texts)


def test_batches_hold_at_most_the_wanted_tokens():
    model = Classifier(toy_classifier(), "cpu", torch.float32, 8)
    texts = [[1] * length for length in (3, 2, 4, 9, 1)]
    assert [[len(text) for text in batch] for batch in model._split(texts)] == [[3, 2], [4], [9], [1]]


def test_a_policy_learns_what_a_reward_model_prefers(prefers_a, tmp_path):
    options = {**OPTIONS, "rm_model": prefers_a, "lr": 1e-2, "rollout_batch_size": 4, "n_samples_per_prompt": 8}
    run = toy_run(["reward_model"], tmp_path / "run", steps=15, **options)
    rewards = [record["reward/mean"] for record in run.metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.5


def test_a_resumed_run_is_equal(prefers_a, tmp_path):
    options = {**OPTIONS, "rm_model": prefers_a, "lr": 1e-2, "rm_max_tokens": 24}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    one = toy_run(["reward_model"], whole, steps=4, **options)
    toy_run(["reward_model"], parts, steps=2, **options)
    two = toy_run(["reward_model"], None, steps=4, **{**options, "load": parts, "save": None})
    assert [r["reward/mean"] for r in one.metrics[2:]] == [r["reward/mean"] for r in two.metrics[-2:]]
    weights = [
        {(path.name, name): tensor for path in root.rglob("*.safetensors") for name, tensor in load_file(path).items()}
        for root in (folder / "checkpoints" / "step_00000004" for folder in (whole, parts))
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_finished_answer_ends_as_the_template_writes_it():
    sample = Sample(prompt=[{"role": "user", "content": "a"}], tokens=[5, 6, 1], response_length=2)
    sample.status = Status.COMPLETED
    assert complete(sample, [1, 9]) == [5, 6, 1, 9]
    assert complete(sample, ()) == [5, 6, 1]
    sample.status = Status.TRUNCATED
    assert complete(sample, [1, 9]) == [5, 6, 1]


def run_with(path, **options):
    return toy_run(["reward_model"], steps=1, **{**OPTIONS, "rm_model": path, **options})


def test_another_model_than_a_classifier_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"--rm-model .*: it is not a sequence classifier .LlamaForCausalLM in"):
        run_with(toy_files("llama") / "model")
    with pytest.raises(CheckpointError, match=r"--rm-model .*: no such directory"):
        run_with(tmp_path / "nothing")


def test_several_labels_are_refused(directory):
    weights = load_file(directory / "model.safetensors")
    save_file(weights | {"score.weight": torch.zeros(2, 32)}, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"it has 2 labels \(score.weight\), and a reward model has one score"):
        run_with(directory)
    weights.pop("score.weight")
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"it has no weight score.weight"):
        run_with(directory)


def test_another_vocabulary_is_refused(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens("<new>")
    tokenizer.save_pretrained(directory)
    with pytest.raises(ConfigError, match=r"another vocabulary than the policy's .*: \d+ tokens, and the policy's has"):
        run_with(directory)


def test_another_chat_template_is_refused(directory):
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"its chat template differs from the policy's"):
        run_with(directory)
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"it has no chat template, so it was trained on texts"):
        run_with(directory, apply_chat_template=True)
    run_with(directory)  # texts need no template


def test_messages_of_a_rollout_function_need_a_template_of_the_reward_model(directory):
    (directory / "chat_template.jinja").unlink()
    score = make_reward(run_with(directory).run)
    sample = Sample(prompt=[{"role": "user", "content": "a"}], tokens=[5, 6, 1], response_length=2)
    with pytest.raises(DataError, match=r"is a list of messages, and --rm-model .* has no chat template"):
        asyncio.run(score(None, [sample]))


def test_a_text_that_is_too_long_is_refused(directory):
    edit(directory / "config.json", max_position_embeddings=3)
    with pytest.raises(MilesError, match=r"a prompt with its response has . tokens, and the reward model reads 3"):
        run_with(directory)
    check_lengths([[1, 2, 3]], 3)


def test_weights_that_are_missing_are_named(directory):
    weights = load_file(directory / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(MilesError, match=r"1 weights are missing, first model.norm.weight"):
        run_with(directory)


@pytest.mark.parametrize("name", ["tpu0", "cuda:99", "meta"])
def test_a_device_that_is_absent_is_refused(name):
    with pytest.raises(ConfigError, match=f"--rm-device {name}: "):
        find_device(name)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rm_model": None}, "give --rm-model DIR"),
        ({"rm_type": "exact", "label_key": "label"}, "it provides this reward and nothing else"),
        ({"reward_key": "x"}, "this reward is a number"),
    ],
)
def test_refused(options, why):
    with pytest.raises(PlanError, match=why):
        plan(["reward_model"], **{**OPTIONS, "rm_model": toy_classifier(), **options})


def test_the_plugin_is_found_by_its_reward():
    assert "reward_model" in {each.name for each in plan(**{**OPTIONS, "rm_model": toy_classifier()}).plugins}
