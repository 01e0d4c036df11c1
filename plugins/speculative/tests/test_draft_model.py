"""A small model as draft."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from miles_core.cli.main import main
from miles_core.engine import Request, Sampling
from miles_core.plugin import CheckpointError, PlanError
from miles_embedded import load_model
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_speculative.decoder import SpeculativeDecoder
from miles_speculative.draft_files import misfits
from miles_speculative.draft_model import attach_model
from miles_speculative.eagle import new_eagle
from miles_speculative.lookahead import Lookahead
from miles_speculative.tree import TreeDecoder
from miles_testing.tiny import random_checkpoint, tiny_checkpoint
from miles_testing.toy import toy_files

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8, "intermediate_size": 16}


def answers(engine, requests):
    async def ask():
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def small():
    """A draft for the toy run's model, with tied embeddings."""
    return toy_files("llama", **SMALL) / "model"


def test_in_a_run_trained_on_the_rollouts(toy_run, small):
    given = {
        "draft_model_path": small,
        "spec_lookahead": 2,
        "rollout_max_response_len": 12,
        "steps": 3,
        "draft_lr": 1e-2,
    }
    run = toy_run(["speculative", "r3", "tis"], **given, online_sft_interval=1)
    assert run.metrics[-1]["train/draft_kl"] < run.metrics[0]["train/draft_kl"]
    for record in run.metrics:
        assert record["speculative/accept_rate"] > 0 and record["mismatch/abs_log_prob"] < 1e-4
    ours, theirs = (dict(m.draft.named_parameters()) for m in (run.engine.model, run.trainer.model))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    start = load_model(small).model.embed_tokens.weight
    assert not torch.equal(start, ours["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_draft_that_is_the_policy_is_always_kept(family, tmp_path):
    """Its keys and values are its own, and right after every step: with the policy's own weights p equals q."""
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=2, eos_token_id=1)
    checkpoint = random_checkpoint(config, tmp_path) if family == "gpt2" else tiny_checkpoint(family, tmp_path)
    engine = EmbeddedEngine(load_model(checkpoint), Settings(str, eos=[1]))
    engine.decoder = SpeculativeDecoder(attach_model(engine.model, checkpoint), Lookahead(3))
    requests = [
        Request([3 + i, 7, 5][: 2 + i % 2], Sampling(17, temperature=t, ignore_eos=True), key=i)
        for i, t in enumerate((0.0, 1.0, 1.3))
    ]

    for response in answers(engine, requests):
        kept = sum(v for n, v in response.metrics.items() if n.startswith("kept_"))
        assert kept >= 0.99 * response.metrics["drafted"] > 10


EAGLE = {
    "fc.weight",
    "layers.0.post_attention_layernorm.weight",
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


def test_an_eagle_head_drafts_trees_and_learns(toy_run, tmp_path, capsys):
    policy, head = toy_files() / "model", tmp_path / "head"
    assert main(["convert", "--eagle-num-layers", "1", "--model-dir", str(policy), "--save-dir", str(head)]) == 0
    assert "EAGLE head" in capsys.readouterr().out
    assert load_file(head / "model.safetensors").keys() == EAGLE
    given = {"draft_model_path": head, "spec_lookahead": 2, "spec_topk": 2, "rollout_max_response_len": 12}
    run = toy_run(["speculative", "r3", "tis"], **given, steps=8, lr=1e-9, draft_lr=1e-2, online_sft_interval=1)
    first, last = run.metrics[0], run.metrics[-1]
    assert last["train/draft_kl"] < 0.8 * first["train/draft_kl"]
    assert last["train/draft_features"] < 0.8 * first["train/draft_features"]
    assert last["speculative/accept_rate"] > 0 and last["mismatch/abs_log_prob"] < 1e-4
    ours, theirs = (dict(m.draft.named_parameters()) for m in (run.engine.model, run.trainer.model))
    assert ours.keys() == EAGLE and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_an_eagle_head_is_read_as_published(tmp_path):
    """From torch's own file, with a bias and copies of what the policy has; not from another layout."""
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "policy")
    head = new_eagle(checkpoint, tmp_path / "head", 1)
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    published = tensors | {"fc.bias": torch.ones(len(tensors["fc.weight"])), "embed_tokens.weight": torch.zeros(64, 32)}
    torch.save(published, head / "pytorch_model.bin")
    draft = attach_model(load_model(checkpoint), head)
    assert draft.parameters.keys() == EAGLE | {"fc.bias"}
    assert torch.equal(draft.parameters["fc.bias"], published["fc.bias"])
    (head / "pytorch_model.bin").unlink()
    save_file(tensors | {"lm_head.weight": torch.zeros(1)}, head / "model.safetensors")
    engine = EmbeddedEngine(load_model(checkpoint), Settings(str, eos=[1]))
    engine.decoder = TreeDecoder(attach_model(engine.model, head), Lookahead(3), 2)
    plain = EmbeddedEngine(load_model(checkpoint), Settings(str, eos=[1]))
    requests = [Request([3 + i, 7, 5], Sampling(12, temperature=0.0, ignore_eos=True), key=i) for i in range(3)]
    assert [r.tokens for r in answers(engine, requests)] == [r.tokens for r in answers(plain, requests)]
    wide = tiny_checkpoint("qwen3", tmp_path / "wide", hidden_size=64)
    assert "trained for another model" in next(misfits(head, wide))
    save_file(tensors | {"fc.weight": torch.zeros(2, 6), "other": torch.zeros(2)}, head / "model.safetensors")
    with pytest.raises(CheckpointError, match="2 tensors are missing, unknown or of another shape"):
        attach_model(engine.model, head)
    save_file(
        {"fc.weight": torch.zeros(2, 6), "midlayer.hidden_norm.weight": torch.zeros(2)}, head / "model.safetensors"
    )
    assert "EAGLE-3" in next(misfits(head, checkpoint))


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "list", "module"])
def test_a_damaged_file_of_a_head_is_one_sentence(damage, tmp_path):
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "policy")
    head = new_eagle(checkpoint, tmp_path / "head", 1)
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    file = head / "pytorch_model.bin"
    torch.save({"list": [1], "module": torch.nn.Linear(1, 1)}.get(damage, tensors), file)
    if damage in ("cut", "text", "empty"):
        file.write_bytes({"cut": file.read_bytes()[:-500], "text": b"<html>", "empty": b""}[damage])
    with pytest.raises(
        CheckpointError, match=r"--draft-model-path: .*pytorch_model\.bin (is damaged|does not hold)"
    ) as caught:
        attach_model(load_model(checkpoint), head)
    assert "\n" not in str(caught.value)


def test_damaged_safetensors_of_a_draft_are_found_by_the_plan(tmp_path):
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "policy")
    head = new_eagle(checkpoint, tmp_path / "head", 1)
    file = head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "model.safetensors is damaged or truncated" in next(misfits(head, checkpoint))


def test_a_draft_of_another_kind_is_refused(toy_run, small, tmp_path):
    policy = toy_files() / "model"
    assert "not a Hugging Face checkpoint" in next(misfits(tmp_path, policy))
    other = tiny_checkpoint("llama", tmp_path / "other", **SMALL)
    assert "a quarter to a tenth" in next(misfits(policy, small))
    with pytest.raises(PlanError, match="are about an MTP layer"):
        toy_run(["speculative"], draft_model_path=small, enable_mtp_training=True)
    with pytest.raises(
        PlanError, match="its vocabulary has 64 tokens and the policy's 259"
    ):  # before anything is loaded
        toy_run(["speculative"], draft_model_path=other)


def test_a_draft_of_another_tokenizer_is_refused_in_the_plan(toy_run, small, tmp_path):
    """As many tokens, but one has another name, special or not; the same ones are taken from files of any form."""
    policy, draft = toy_files() / "model", tmp_path / "draft"
    shutil.copytree(small, draft)
    files = {
        draft / name: (draft / name).read_text(encoding="utf-8") for name in ("tokenizer.json", "tokenizer_config.json")
    }
    for token in ("<|start|>", "z"):
        for file, text in files.items():
            file.write_text(text.replace(json.dumps(token), '"another"'), encoding="utf-8")
        (why,) = misfits(draft, policy)
        assert why.startswith(f"--draft-model-path {draft}: its tokenizer differs (2 entries differ, ")
    with pytest.raises(PlanError, match="2 entries differ"):
        toy_run(["speculative"], draft_model_path=draft)
    # the older form: vocabulary and merges in files of their own
    known, said = map(json.loads, files.values())
    (draft / "tokenizer.json").unlink()
    (why,) = misfits(draft, policy)
    assert "tokenizer in" in why
    (draft / "vocab.json").write_text(json.dumps(known["model"]["vocab"]), encoding="utf-8")
    (draft / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), said["eos_token"])
    (draft / "tokenizer_config.json").write_text(
        json.dumps(special | {"tokenizer_class": "GPT2Tokenizer"}), encoding="utf-8"
    )
    assert not list(misfits(draft, policy))
