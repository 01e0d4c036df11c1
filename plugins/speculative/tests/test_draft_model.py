"""A small model as draft."""

from __future__ import annotations

import asyncio

import pytest
import torch

from miles_core import CheckpointError, PlanError
from miles_core.backend import Request, Sampling
from miles_core.testing.tiny import tiny_checkpoint
from miles_core.testing.toy import toy_files
from miles_embedded import load_model
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_speculative.decoder import SpeculativeDecoder
from miles_speculative.draft_model import attach_model, check_draft
from miles_speculative.lookahead import Lookahead

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8, "intermediate_size": 16}


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


def test_a_draft_that_is_the_policy_is_always_kept(tmp_path):
    """Its keys and values are its own, and right after every step: with the policy's own weights p equals q."""
    checkpoint = tiny_checkpoint("qwen3", tmp_path)
    engine = EmbeddedEngine(load_model(checkpoint), Settings(str, eos=[1]))
    engine.decoder = SpeculativeDecoder(attach_model(engine.model, checkpoint), Lookahead(3))
    requests = [
        Request([3 + i, 7, 5][: 2 + i % 2], Sampling(17, temperature=t, ignore_eos=True), key=i)
        for i, t in enumerate((0.0, 1.0, 1.3))
    ]

    async def main():
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    for response in asyncio.run(main()):
        kept = sum(v for n, v in response.metrics.items() if n.startswith("kept_"))
        assert kept >= 0.99 * response.metrics["drafted"] > 10


def test_a_draft_of_another_kind_is_refused(toy_run, small, tmp_path):
    tokenizer = load_tokenizer(toy_files() / "model")
    with pytest.raises(CheckpointError, match="not a Hugging Face checkpoint"):
        check_draft(str(tmp_path), str(toy_files() / "model"), tokenizer)
    other = tiny_checkpoint("llama", tmp_path / "other", **SMALL)
    with pytest.raises(CheckpointError, match="its vocabulary has 64 tokens and the policy's 259"):
        check_draft(str(other), str(toy_files() / "model"), tokenizer)
    with pytest.raises(CheckpointError, match="a quarter to a tenth"):
        check_draft(str(toy_files() / "model"), str(small), tokenizer)
    with pytest.raises(PlanError, match="are about an MTP layer"):
        toy_run(["speculative"], draft_model_path=small, enable_mtp_training=True)


def load_tokenizer(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
