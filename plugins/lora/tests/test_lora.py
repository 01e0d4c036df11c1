"""Adapters are trained, and everything that leaves the trainer has them merged in."""

import pytest
import torch

pytest.importorskip("peft")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles_core.plugin import ConfigError
from miles_testing import toy_run


def test_engine_trainer_and_export_agree(tmp_path):
    done = toy_run(["lora"], steps=3, lr=1e-2, export_hf=tmp_path / "hf", verify_logprobs=True)
    assert all(record["verify/abs_log_prob"] < 1e-4 for record in done.metrics)
    trained = {n: p for n, p in done.trainer.model.named_parameters() if p.requires_grad}
    assert done.metrics[-1]["verify/moved"] > 0.99 and trained and all(".lora." in name for name in trained)
    start = load_file(done.run.policy.hf_checkpoint + "/model.safetensors")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == start.keys()
    moved = {n for n in exported if not torch.equal(exported[n].float(), start[n].float())}
    assert moved and all(n.endswith(("q_proj.weight", "v_proj.weight")) for n in moved)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    sample = done.samples[-1]
    tokens = torch.tensor([sample["tokens"]])
    served = dict(done.engine.model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(served[name].float(), parameter, rtol=0, atol=1e-6)
    assert torch.isfinite(plain(tokens).logits).all()


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="--lora-target-modules q_project"):
        toy_run(["lora"], lora_target_modules="q_project")
