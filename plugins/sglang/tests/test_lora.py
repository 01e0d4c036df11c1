"""Training of adapters with a real SGLang, which receives the adapters alone; skipped where none is installed."""

import pytest
import torch

from miles_sglang import installed
from miles_testing import tiny_checkpoint, toy_run

pytestmark = pytest.mark.skipif(installed.version() is None, reason="SGLang is not installed")

#: What SGLang's kernels take, and a backend for adapters that needs no Triton.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
LORA = {"lora_sync": "adapter", "lora_target_modules": "all-linear", "lora_rank": 4, "lr": 2e-2}


@pytest.mark.thorough  # starts SGLang
def test_sglang_applies_the_adapters_that_are_trained(tmp_path):
    """Each version moves away from the base, and SGLang's log-probabilities follow the trainer's."""
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "model", 0, **SIZES)
    backend = "triton" if torch.cuda.is_available() else "torch_native"
    options = {"engine": "sglang", "sglang_lora_backend": backend, "sglang_max_total_tokens": 4096, "dtype": "float32"}
    options |= {"device": "auto" if torch.cuda.is_available() else "cpu", "kl_loss_coef": 1e-6}
    done = toy_run(["lora"], tmp_path / "run", steps=4, hf_checkpoint=checkpoint, **LORA, **options)
    first, last = done.metrics[0], done.metrics[-1]
    assert last["train/lora_delta_norm"] > first["train/lora_delta_norm"] > 0
    assert last["train/ref_kl"] > 1e-2, "the adapters change the policy"
    assert all(record["mismatch/abs_log_prob"] < 1e-3 for record in done.metrics)
    assert last["sync/bytes"] < sum(p.nbytes for p in done.parts[0].learner.rank.trainer.model.parameters()) / 4
