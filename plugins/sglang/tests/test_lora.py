"""Training of adapters with a real SGLang, which receives the adapters alone; skipped where none is installed."""

import pytest
import torch

from miles_sglang import installed
from miles_testing import tiny_checkpoint, toy_run

pytestmark = pytest.mark.skipif(installed.version() is None, reason="SGLang is not installed")

#: What SGLang's kernels take, and a backend for adapters that needs no Triton.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
LORA = {"lora_sync": "adapter", "lora_target_modules": "all-linear", "lora_rank": 4, "lr": 2e-2}


TURNS = """
async def generate(args, sample, sampling_params):
    sample.policy = ["solver", "judge"][sample.group_index % 2]
    await args.ask(policy="teacher")
    turn = await args.ask(policy=sample.policy)
    sample.tokens, sample.response_length = turn.tokens, len(turn.response.tokens)
    return sample
"""


@pytest.mark.thorough  # starts SGLang
@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_policies_train_adapters_on_one_sglang(tmp_path, schedule):
    """Each version moves away from the base, and SGLang's log-probabilities of each policy follow its trainer's. With the schedule ``async``
    a policy receives its adapter while requests of the others are in flight."""
    (tmp_path / "turns.py").write_text(TURNS)
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "model", 0, **SIZES)
    backend = "triton" if torch.cuda.is_available() else "torch_native"
    policies = {"solver": {"lora": {"rank": 2}}, "judge": {}, "teacher": {"role": "frozen", "generates": True}}
    options = {"engine": "sglang", "sglang_lora_backend": backend, "sglang_max_total_tokens": 4096, "dtype": "float32"}
    options |= {"device": "auto" if torch.cuda.is_available() else "cpu", "kl_loss_coef": 1e-6, "schedule": schedule}
    options |= {"policies": policies, "custom_generate_function_path": tmp_path / "turns.py", "verify_logprobs": True}
    done = toy_run(["lora"], tmp_path / "run", steps=4, hf_checkpoint=checkpoint, **LORA, **options)
    first, last = done.metrics[0], done.metrics[-1]
    assert [part.engine.version for part in done.parts] == [4, 4, 0]
    assert len({id(part.engine.link._server) for part in done.parts}) == 1, "one SGLang"
    for name, part in zip(("solver", "judge"), done.parts, strict=False):
        assert last[f"{name}/train/lora_delta_norm"] > first[f"{name}/train/lora_delta_norm"] > 0
        assert last[f"{name}/train/ref_kl"] > 1e-3, "the adapters change the policy"
        assert all(record[f"{name}/verify/abs_log_prob"] < 1e-3 for record in done.metrics)
        whole = sum(p.nbytes for p in part.learner.rank.trainer.model.parameters())
        assert last[f"{name}/sync/bytes"] < whole / 4
